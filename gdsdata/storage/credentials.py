"""Credentials: a secret from the user, or from a chain of places, renewed before it expires."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from gdsdata.fork_safe import fork_safe_lock
from gdsdata.storage.secret import Anonymous, NotPickled, Secret, steady_s

# A secret is renewed this long before its end, or when three quarters of its life have passed.
_EARLY_S = 600.0
# A secret that ends within this time signs nothing new, because the request must arrive in time.
_USABLE_S = 15.0
# After a failed renewal, the old secret is used for so long before the next try.
_PAUSE_S = 20.0
# A secret is new for so long: requests that failed meanwhile were signed with the one before. After
# a refusal without a reason, secrets are fetched no more often than that. The same holds for those
# that have ended when they are fetched: this machine's clock is wrong.
_NEW_S = 5.0
# A mapping need not name these.
_OF_EACH_SECRET = {"expires_at", "source"}

_now = time.time  # compared with the end of a secret, once: the clock may be set afterwards


class _Kept(NamedTuple):
    """A secret, when it is to be renewed, and when it ends: seconds of `steady_s`."""

    secret: Secret | None
    renew_at: float
    ends_at: float


_NOTHING = _Kept(None, -math.inf, -math.inf)


class Credentials(NotPickled):
    """A secret, and a newer one before it expires. Thread-safe: one thread renews at a time.

    While the old secret is valid, other threads use it, also if its renewal fails.

    Args:
        fetch: returns a new secret. It may take long.
    """

    def __init__(self, fetch: Callable[[], Secret]) -> None:
        self._fetch = fetch
        self._renewing = fork_safe_lock()
        self._kept = _NOTHING  # replaced as a whole: `current` reads it without the lock
        self._fetched_at = self._tried_at = -math.inf  # seconds of `steady_s`

    def __repr__(self) -> str:
        return "Credentials()"

    def current(self) -> Secret:
        """Return the secret to sign with now."""
        kept = self._kept
        if kept.secret is not None and steady_s() < kept.renew_at:
            return kept.secret
        usable = kept.secret if steady_s() < kept.ends_at - _USABLE_S else None
        if not self._renewing.acquire(blocking=usable is None):
            assert usable is not None
            return usable
        try:
            newer = self._kept
            if newer.secret is not None and newer.secret is not kept.secret and steady_s() < newer.renew_at:
                return newer.secret  # another thread renewed it while this one waited
            return self._renew(usable)
        finally:
            self._renewing.release()

    def distrust(self) -> None:
        """Fetch a new secret at the next call, because a server says that this one has expired.

        One that was fetched just now is kept: another thread has renewed it.
        """
        with self._renewing:
            # One that had ended when it was fetched may have a successor by now.
            if steady_s() >= min(self._fetched_at + _NEW_S, self._kept.ends_at):
                self._kept = _NOTHING

    def doubt(self, age_s: float) -> None:
        """Fetch a new secret at the next call, because a server refuses what this one signed.

        The server may have refused the object and not the secret. If no new secret can be fetched,
        this one is therefore used further.

        Args:
            age_s: how long ago it signed. A secret that was fetched later is kept.
        """
        with self._renewing:
            now = steady_s()
            if self._fetched_at <= now - age_s and now >= self._tried_at + _NEW_S:
                self._kept = self._kept._replace(renew_at=-math.inf)

    def _renew(self, usable: Secret | None) -> Secret:
        self._tried_at = steady_s()
        try:
            fetched = self._fetch()
        except Exception:
            if usable is None:
                raise
            self._kept = self._kept._replace(renew_at=steady_s() + _PAUSE_S)
            return usable
        life_s, now = fetched.expires_at - _now(), steady_s()
        in_s = life_s - min(_EARLY_S, life_s / 4) if 0 < life_s < math.inf else max(life_s, _NEW_S)
        self._kept, self._fetched_at = _Kept(fetched, now + in_s, now + life_s), now
        return fetched


def given(credentials: object, kinds: Iterable[type[Secret]], scheme: str) -> Credentials | None:
    """Return the credentials that the option ``credentials`` gives, or None if it is None.

    Args:
        credentials: ``"anonymous"``, a mapping such as ``{"access_key_id": ...,
            "secret_access_key": ...}``, or a function that returns such a mapping. If it has
            ``"expires_at"`` (a datetime with its zone, or seconds since the epoch), the function is
            called again before that.
        kinds: of secrets that the scheme signs with.
        scheme: for messages.

    Raises:
        ValueError: it is none of these.
    """
    allowed = tuple(kinds)
    if credentials is None or isinstance(credentials, Credentials):
        return credentials
    if credentials == "anonymous":
        return Credentials(Anonymous)
    if isinstance(credentials, (Mapping, Secret)):
        secret = secret_of(credentials, allowed, scheme)
        return Credentials(lambda: secret)
    if callable(credentials):
        return Credentials(lambda: secret_of(credentials(), allowed, scheme))
    raise ValueError(
        f"credentials of {scheme}: is a {type(credentials).__name__}, but should be 'anonymous', "
        "a mapping of names to secrets, or a function that returns one"
    )


def secret_of(values: object, kinds: tuple[type[Secret], ...], scheme: str) -> Secret:
    """Return the secret that a mapping has. Its values are shown by no message.

    Raises:
        ValueError: names are missing or unknown.
    """
    if isinstance(values, Secret):
        if isinstance(values, (Anonymous, *kinds)):
            return values
        raise ValueError(f"credentials of {scheme}: {type(values).__name__} is not what it signs with")
    if not isinstance(values, Mapping):
        raise ValueError(f"credentials of {scheme}: the function returned a {type(values).__name__}, and no mapping")
    names = set(values) - _OF_EACH_SECRET
    for kind in kinds:
        fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in _OF_EACH_SECRET}
        needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if needed <= names <= set(fields):
            texts = {name: str(values[name]) for name in names if values[name] is not None}
            if not all(texts.get(name) for name in needed):
                raise ValueError(f"credentials of {scheme}: {', '.join(sorted(needed))} must not be empty")
            return kind(**texts, expires_at=end_of(values.get("expires_at")), source="credentials=")
    wanted = " or ".join(map(_names_of, kinds))
    raise ValueError(f"credentials of {scheme}: has the names {sorted(map(str, names))}, but needs {wanted}")


def _names_of(kind: type[Secret]) -> str:
    """Return the names that a secret needs, and those that it may have, for a message."""
    fields = [field for field in dataclasses.fields(kind) if field.name not in _OF_EACH_SECRET]
    needed = ", ".join(field.name for field in fields if field.default is dataclasses.MISSING)
    others = ", ".join(field.name for field in fields if field.default is not dataclasses.MISSING)
    return f"{needed} (and may have {others})" if others else needed


def end_of(expires: Any, name: str = "expires_at") -> float:
    """Return when something expires, in seconds since the epoch, from a time in any form.

    Args:
        name: of what says so, for the error.

    Raises:
        ValueError: it is no time.
    """
    if expires is None or expires == "":
        return math.inf
    if isinstance(expires, str):
        said = f"{name}: {expires[:40]!r}"
        try:
            expires = datetime.fromisoformat(expires.replace("Z", "+00:00"))
        except ValueError:
            raise ValueError(f"{said} is no time: write it as 2031-01-31T12:00:00Z") from None
        if expires.tzinfo is None:
            raise ValueError(f"{said} has no time zone: write it as 2031-01-31T12:00:00Z")
    if isinstance(expires, datetime):
        if expires.tzinfo is None:
            raise ValueError(f"{name}: the datetime has no time zone: add tzinfo=datetime.timezone.utc")
        return expires.timestamp()
    if isinstance(expires, (int, float)):
        return float(expires)
    raise ValueError(f"{name}: is a {type(expires).__name__}, but should be a datetime or seconds since the epoch")
