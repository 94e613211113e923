"""``s3://bucket/key``: Amazon S3 and every server with its interface."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from gdsdata.errors import IoError
from gdsdata.fork_safe import fork_safe_lock
from gdsdata.storage import aws_chain, credentials, failures, sigv4, transport, xml_document
from gdsdata.storage.options import check_options, checked_endpoint
from gdsdata.storage.secret import Keys
from gdsdata.storage.store import Access
from gdsdata.storage.stores.xml_store import MOST_ACCESS_S, XmlStore
from gdsdata.storage.transport import Request, Response

OPTIONS: dict[str, type | tuple[type, ...]] = {
    "endpoint_url": str,
    "region": str,
    "profile": str,
    "addressing": str,
    "requester_pays": bool,
    "credentials": object,
}
_DEFAULT_REGION = "us-east-1"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_ASKING_S = 30.0  # for a region: a network without a way to the Internet answers nothing
# The ends of names of directory buckets, and of their access points. They want sessions.
_OF_EXPRESS = ("--x-s3", "--xa-s3")
_HOST_LABEL = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9-]{1,40}")


def make(bucket: str, scheme: str, options: Mapping[str, Any]) -> S3Store:
    """Return the store of a bucket.

    Args:
        options: ``endpoint_url`` (a server other than AWS), ``region``, ``profile`` (of the shared
            files), ``credentials`` (see `gdsdata.storage.credentials.given`), and ``addressing``:
            "virtual" (the bucket in the host's name), "path", or "auto": virtual for AWS.
            ``requester_pays``: the bucket's owner wants that, and you agree.

    Raises:
        ValueError: an option or the bucket's name is wrong.
    """
    check_options(scheme, options, OPTIONS)
    if bucket.startswith("arn:"):
        raise ValueError(f"{scheme}://{bucket}: name an access point by its alias, which is a bucket's name")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"{scheme}://{bucket}: a bucket's name is 2 to 255 letters, digits, '.', '-' and '_'")
    profile_name = options.get("profile")
    profile = aws_chain.read_profile(profile_name)
    addressing, source = options.get("addressing"), "addressing"
    if not addressing:
        addressing, source = profile.addressing_style or "auto", f"addressing_style of the profile {profile.name}"
    if addressing not in ("auto", "path", "virtual"):
        raise ValueError(f"{source}={addressing!r}: choose 'auto', 'path' or 'virtual'")
    endpoint, source = aws_chain.endpoint_of(profile)
    if options.get("endpoint_url"):
        endpoint, source = options["endpoint_url"], "endpoint_url"
    url = f"{scheme}://{bucket}"
    if bucket.endswith(_OF_EXPRESS) and not endpoint:
        raise ValueError(
            f"{url}: is a directory bucket (S3 Express One Zone), and gdsdata does not sign for these: copy the "
            "objects to a general purpose bucket"
        )
    return S3Store(
        bucket,
        credentials.given(options.get("credentials"), [Keys], scheme)
        or credentials.Credentials(lambda: aws_chain.find_keys(profile_name, url)),
        checked_endpoint(endpoint, source) if endpoint else "",
        options.get("region") or aws_chain.region_of(profile),
        addressing,
        bool(options.get("requester_pays")),
    )


class S3Store(XmlStore):
    """A bucket of S3: see `gdsdata.storage.store.Store`.

    Args:
        endpoint: of a server other than AWS, or "".
        region: "" if nothing names it. Then AWS is asked once.
        requester_pays: each request says so.
    """

    metadata_prefix = "x-amz-meta-"

    def __init__(
        self,
        bucket: str,
        secrets: credentials.Credentials,
        endpoint: str,
        region: str,
        addressing: str,
        requester_pays: bool,
    ) -> None:
        super().__init__("s3", bucket, secrets)
        self._endpoint = endpoint
        self._region = region or (_DEFAULT_REGION if endpoint else "")
        self._payer = {"x-amz-request-payer": "requester"} if requester_pays else {}
        self._asking = fork_safe_lock()
        is_label = _HOST_LABEL.fullmatch(bucket) is not None
        self._is_virtual = addressing == "virtual" or (addressing == "auto" and not endpoint and is_label)

    @property
    def region(self) -> str:
        """The bucket's region, as far as it is known."""
        with self._asking:
            if not self._region:
                self._region = self._asked_region()
            return self._region

    def bucket_url(self) -> str:
        """Return the bucket's http(s) URL."""
        endpoint = self._endpoint
        if not endpoint:
            suffix = "amazonaws.com.cn" if self.region.startswith("cn-") else "amazonaws.com"
            endpoint = f"https://s3.{self.region}.{suffix}"
        return _at(endpoint, self.bucket, self._is_virtual)

    def sign(self, request: Request) -> Request:
        """Sign a request in its headers."""
        secret = self.secrets.current()
        if not isinstance(secret, Keys):
            return request
        headers = {**request.headers, **self._payer}
        headers = sigv4.with_headers(sigv4.AWS, request.method, request.url, headers, secret, self.region, _utc_now())
        return replace(request, headers=headers)

    def signed_access(self, url: str) -> Access:
        """Sign a URL in its query."""
        secret = self.secrets.current()
        if not isinstance(secret, Keys):
            return Access(url, {}, MOST_ACCESS_S)
        now = _utc_now()
        lifetime_s = int(secret.lifetime_s(now.timestamp(), MOST_ACCESS_S))
        if self._payer:
            url += f"?{sigv4.query_of(self._payer)}"
        return Access(sigv4.with_query(sigv4.AWS, "GET", url, secret, self.region, now, lifetime_s), {}, lifetime_s)

    def payload_headers(self, sha256: str) -> dict[str, str]:
        """Return the header with a body's SHA-256."""
        return {"x-amz-content-sha256": sha256}

    def crc32c_headers(self, crc32c: str) -> dict[str, str]:
        """Return the header with a body's CRC-32C."""
        return {"x-amz-checksum-crc32c": crc32c}

    def begin_headers(self) -> dict[str, str]:
        """Return the header that announces CRC-32C for the parts of an upload."""
        return {"x-amz-checksum-algorithm": "CRC32C"}

    def verifies_crc32c(self, begun: Response) -> bool:
        """Return whether the server knows CRC-32C: if it does, it repeats the word.

        Others verify the SHA-256 of each part, which the signature covers.
        """
        return begun.headers.get("x-amz-checksum-algorithm", "").upper() == "CRC32C"

    def moved(self, request: Request, response: Response) -> Request | None:
        """Follow AWS to the region that the bucket is in."""
        region = _region_in(response)
        if self._endpoint or not region:
            return None
        with self._asking:
            self._region = region
        parts = urlsplit(request.url)
        path = parts.path if self._is_virtual else parts.path.removeprefix(f"/{self.bucket}")
        url = self.bucket_url() + path + (f"?{parts.query}" if parts.query else "")
        return replace(request, url=url) if url != request.url else None

    def _asked_region(self) -> str:
        """Ask AWS for the region of the bucket: each answer has it, also a refusal."""
        url = _at("https://s3.amazonaws.com", self.bucket, self._is_virtual)
        request = Request("HEAD", url, subject=f"s3://{self.bucket}")
        try:
            response = transport.send(request, accept=(301, 307, 400, 403), deadline_s=_ASKING_S)
        except IoError as error:
            message = f"{error} If this network does not reach it, name the region: region= or AWS_REGION."
            raise IoError(error.errno or errno.EIO, message, request.subject) from None
        return _region_in(response) or _DEFAULT_REGION


def _at(endpoint: str, bucket: str, is_virtual: bool) -> str:
    if not is_virtual:
        return f"{endpoint}/{bucket}"
    scheme, _, host = endpoint.partition("://")
    return f"{scheme}://{bucket}.{host}"


def _region_in(response: Response) -> str:
    region = response.headers.get("x-amz-bucket-region", "")
    if not region and response.status in (301, 307, 400):
        try:
            region = xml_document.text_of(xml_document.parse(response.body[: failures.MOST_ERROR_BYTES]), "Region")
        except ValueError:
            return ""
    return region if _REGION.fullmatch(region) else ""


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)
