"""Secrets that requests are signed with. No text and no pickle ever shows one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NoReturn


def steady_s() -> float:
    """Return seconds of a clock that nobody sets, and that counts a machine's sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class NotPickled:
    """Something with secrets in it."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: secrets are not pickled. Configure the store in the other process too, "
            "or set the environment's variables, which programs inherit."
        )


@dataclass(frozen=True)
class Secret(NotPickled):
    """Something to sign requests with.

    Attributes:
        expires_at: seconds since the epoch, or infinity.
        source: where it was found, for people.
    """

    expires_at: float = field(default=math.inf, kw_only=True)
    source: str = field(default="", kw_only=True, compare=False)

    def lifetime_s(self, at: float, most_s: float) -> float:
        """Return how long it is used from a time on (as `expires_at`), a second at least."""
        return max(1.0, min(most_s, self.expires_at - at))


@dataclass(frozen=True)
class Anonymous(Secret):
    """No secret: requests are not signed."""


@dataclass(frozen=True)
class Keys(Secret):
    """An access key of S3, or of GCS (HMAC). ``session_token`` comes with a temporary one."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Token(Secret):
    """A bearer token of OAuth."""

    token: str = field(repr=False)


@dataclass(frozen=True)
class AccountKey(Secret):
    """The key of an Azure storage account, in base64 as Azure shows it."""

    account_key: str = field(repr=False)


@dataclass(frozen=True)
class SharedAccess(Secret):
    """A shared access signature of Azure: a URL's query that grants access."""

    sas: str = field(repr=False)
