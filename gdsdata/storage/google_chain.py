"""Where Google's tools find credentials: the environment, and google-auth's chain."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from datetime import timezone
from typing import Any

from gdsdata.fork_safe import fork_safe_lock, forks_wait
from gdsdata.storage import transport
from gdsdata.storage.secret import Anonymous, Keys, Secret, Token

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_found: Any = None
_finding = fork_safe_lock()  # guards _found


def find_secret(url: str) -> Secret:
    """Return an HMAC key or a token of the environment, or google-auth's token.

    GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY are GDAL's names, the others Google's.

    Raises:
        PermissionError: there is none.
    """
    key, secret = os.environ.get("GS_ACCESS_KEY_ID"), os.environ.get("GS_SECRET_ACCESS_KEY")
    if key and secret:
        return Keys(key, secret, source="GS_ACCESS_KEY_ID in the environment")
    for name in ("CLOUDSDK_AUTH_ACCESS_TOKEN", "GOOGLE_OAUTH_ACCESS_TOKEN"):
        if os.environ.get(name):
            return Token(os.environ[name], source=f"{name} in the environment")
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return Anonymous(source="STORAGE_EMULATOR_HOST in the environment")
    try:
        return _token_of_google_auth()
    except ImportError:
        more = 'run pip install "gdsdata[gcs]" for application default credentials'
    except Exception as error:
        more = f"google-auth found none either ({type(error).__name__}: run gcloud auth application-default login)"
    raise PermissionError(
        f"{url}: no credentials were found. Set GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY (an HMAC key), "
        f'or CLOUDSDK_AUTH_ACCESS_TOKEN; {more}; or set credentials="anonymous" for a public bucket.'
    )


def _token_of_google_auth() -> Token:
    global _found
    with _finding:
        if _found is None:
            with forks_wait():
                found, _ = importlib.import_module("google.auth").default(scopes=[_SCOPE], request=_request)
                found.refresh(_request)
                _found = found
        else:
            _found.refresh(_request)
        expiry = _found.expiry
        ends = expiry.replace(tzinfo=timezone.utc).timestamp() if expiry is not None else float("inf")
        return Token(_found.token, expires_at=ends, source="google-auth")


class _Answer:
    """A response with the attributes that google-auth reads."""

    def __init__(self, response: transport.Response) -> None:
        self.status = response.status
        self.headers = response.headers
        self.data = response.body


def _request(
    url: str,
    method: str = "GET",
    body: bytes | str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **_: object,
) -> _Answer:
    """Send a request of google-auth's, which wants each answer, also a refusal."""
    content = body.encode() if isinstance(body, str) else body or b""
    request = transport.Request(method, url, dict(headers or {}), content)
    return _Answer(transport.send(request, accept=range(400, 500), deadline_s=min(timeout or 30.0, 30.0)))
