"""`SigningStore`: what all stores do that sign requests by a secret."""

from __future__ import annotations

from gdsdata.storage.credentials import Credentials
from gdsdata.storage.secret import Secret


class SigningStore:
    """A part of a `Store`.

    Attributes:
        secrets: gives what requests are signed with.
    """

    def __init__(self, secrets: Credentials) -> None:
        self.secrets = secrets

    def doubt_secret(self, age_s: float) -> None:
        """Renew the secret: see `Store.doubt_secret`."""
        self.secrets.doubt(age_s)

    def secret(self) -> Secret:
        """Return what requests are signed with now."""
        return self.secrets.current()
