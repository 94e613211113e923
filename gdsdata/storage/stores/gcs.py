"""``gs://bucket/key``: Google Cloud Storage, by its XML interface."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from gdsdata.storage import credentials, google_chain, sigv4
from gdsdata.storage.options import check_options, checked_endpoint
from gdsdata.storage.secret import Keys, Token
from gdsdata.storage.store import Access
from gdsdata.storage.stores.xml_store import MOST_ACCESS_S, XmlStore
from gdsdata.storage.transport import Request, Response

OPTIONS: dict[str, type | tuple[type, ...]] = {"endpoint_url": str, "user_project": str, "credentials": object}
_ENDPOINT = "https://storage.googleapis.com"
_REGION = "auto"  # GCS takes any
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,221}")


def make(bucket: str, scheme: str, options: Mapping[str, Any]) -> GcsStore:
    """Return the store of a bucket.

    Args:
        options: ``endpoint_url`` (or STORAGE_EMULATOR_HOST), ``user_project`` (whom to bill), and
            ``credentials``: an HMAC key or a token, see `gdsdata.storage.credentials.given`.

    Raises:
        ValueError: an option or the bucket's name is wrong.
    """
    check_options(scheme, options, OPTIONS)
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"{scheme}://{bucket}: a bucket's name is 2 to 222 small letters, digits, '.', '-' and '_'")
    endpoint, source = options.get("endpoint_url"), "endpoint_url"
    if not endpoint and os.environ.get("STORAGE_EMULATOR_HOST"):
        endpoint, source = os.environ["STORAGE_EMULATOR_HOST"], "STORAGE_EMULATOR_HOST"
        endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
    url = f"{scheme}://{bucket}"
    return GcsStore(
        bucket,
        credentials.given(options.get("credentials"), [Keys, Token], scheme)
        or credentials.Credentials(lambda: google_chain.find_secret(url)),
        checked_endpoint(endpoint, source) if endpoint else _ENDPOINT,
        options.get("user_project") or "",
    )


class GcsStore(XmlStore):
    """A bucket of GCS: see `gdsdata.storage.store.Store`."""

    metadata_prefix = "x-goog-meta-"

    def __init__(self, bucket: str, secrets: credentials.Credentials, endpoint: str, user_project: str) -> None:
        super().__init__("gs", bucket, secrets)
        self._endpoint = endpoint
        self._deletes_many = False
        self._billed = {"x-goog-user-project": user_project} if user_project else {}

    def bucket_url(self) -> str:
        """Return the bucket's http(s) URL."""
        return f"{self._endpoint}/{self.bucket}"

    def sign(self, request: Request) -> Request:
        """Sign a request in its headers, or add the token."""
        secret = self.secrets.current()
        headers = {**request.headers, **self._billed}
        if isinstance(secret, Keys):
            now = datetime.now(timezone.utc)
            headers = sigv4.with_headers(sigv4.GOOGLE, request.method, request.url, headers, secret, _REGION, now)
        elif isinstance(secret, Token):
            headers["authorization"] = f"Bearer {secret.token}"
        return replace(request, headers=headers)

    def signed_access(self, url: str) -> Access:
        """Sign a URL in its query, or add the token to the headers."""
        secret = self.secrets.current()
        now = time.time()
        lifetime_s = int(secret.lifetime_s(now, MOST_ACCESS_S))
        if isinstance(secret, Keys):
            if self._billed:
                url += f"?{sigv4.query_of({'userProject': self._billed['x-goog-user-project']})}"
            at = datetime.fromtimestamp(now, timezone.utc)
            url = sigv4.with_query(sigv4.GOOGLE, "GET", url, secret, _REGION, at, lifetime_s)
            return Access(url, {}, lifetime_s)
        token = {"authorization": f"Bearer {secret.token}"} if isinstance(secret, Token) else {}
        return Access(url, {**token, **self._billed}, lifetime_s)

    def payload_headers(self, sha256: str) -> dict[str, str]:
        """Return the header with a body's SHA-256, which an HMAC signature covers."""
        return {"x-goog-content-sha256": sha256}

    def crc32c_headers(self, crc32c: str) -> dict[str, str]:
        """Return the header with a body's CRC-32C."""
        return {"x-goog-hash": f"crc32c={crc32c}"}

    def verifies_crc32c(self, begun: Response) -> bool:
        """Return true: GCS always does."""
        return True
