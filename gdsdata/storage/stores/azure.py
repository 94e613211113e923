"""``az://container/key``: Azure Blob Storage, by its REST interface with block blobs."""

from __future__ import annotations

import base64
import hmac
import re
import secrets as random_bytes
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from gdsdata.storage import azure_chain, checksums, credentials, listing, sigv4, transport, xml_document
from gdsdata.storage.options import check_options, checked_endpoint
from gdsdata.storage.secret import AccountKey, Secret, SharedAccess, Token
from gdsdata.storage.store import Access, ObjectInfo
from gdsdata.storage.stores.signing_store import SigningStore
from gdsdata.storage.stores.xml_store import MOST_ACCESS_S, in_threads, info_of, part_bytes_of, written_tag
from gdsdata.storage.transport import Request, Response

OPTIONS: dict[str, type | tuple[type, ...]] = {"account": str, "endpoint_url": str, "credentials": object}
_VERSION = "2021-08-06"  # of the interface
_SIGNATURE_S = 3600.0  # for how long a signature of a request is valid
_MOST_BLOCKS = 50_000
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_CONTAINER = re.compile(r"\$?[a-z0-9][a-z0-9-]{1,62}")


def make(bucket: str, scheme: str, options: Mapping[str, Any]) -> AzureStore:
    """Return the store of a container.

    Args:
        bucket: ``container``, ``container@account``, or
            ``container@account.blob.core.windows.net``.
        options: ``account`` (in place of AZURE_STORAGE_ACCOUNT), ``endpoint_url`` (of the account),
            and ``credentials``: ``account_key``, ``sas`` or ``token``, see
            `gdsdata.storage.credentials.given`.

    Raises:
        ValueError: an option is wrong, or nothing names the account.
    """
    check_options(scheme, options, OPTIONS)
    container, _, host = bucket.partition("@")
    account = host.partition(".")[0] or options.get("account") or azure_chain.account_of_environment()
    if not _CONTAINER.fullmatch(container):
        raise ValueError(f"{scheme}://{bucket}: a container's name has small letters, digits and '-' only")
    if not account:
        raise ValueError(
            f"{scheme}://{bucket}: names no account: set AZURE_STORAGE_ACCOUNT, or write "
            f"{scheme}://{container}@account.blob.core.windows.net/key"
        )
    if not _ACCOUNT.fullmatch(account):
        raise ValueError(f"{scheme}://{bucket}: the account {account!r} has other than small letters and digits")
    endpoint, source = options.get("endpoint_url"), "endpoint_url"
    if not endpoint and not host:
        endpoint, source = azure_chain.endpoint_of_environment(account)
    if not endpoint:
        domain = host.partition(".")[2].replace("dfs.", "blob.", 1) or "blob.core.windows.net"
        endpoint, source = f"https://{account}.{domain}", "the URL"
    url = f"{scheme}://{bucket}"
    return AzureStore(
        bucket,
        container,
        account,
        credentials.given(options.get("credentials"), [AccountKey, SharedAccess, Token], scheme)
        or credentials.Credentials(lambda: azure_chain.find_secret(url)),
        checked_endpoint(endpoint, source),
    )


class AzureStore(SigningStore):
    """The blobs of one container: see `gdsdata.storage.store.Store`."""

    def __init__(
        self, bucket: str, container: str, account: str, secrets: credentials.Credentials, endpoint: str
    ) -> None:
        super().__init__(secrets)
        self.container = container
        self._bucket = bucket
        self._account = account
        self._url = f"{endpoint}/{container}"

    def __repr__(self) -> str:
        return f"AzureStore(az://{self._bucket})"

    def url_of(self, key: str) -> str:
        """Return a blob's URL as users write it."""
        return f"az://{self._bucket}/{key}"

    def list(self, prefix: str, delimiter: str = "") -> Iterator[ObjectInfo | str]:
        """Yield blobs and common prefixes: see `Store.list`."""
        query = {"restype": "container", "comp": "list", "prefix": prefix}
        if delimiter:
            query["delimiter"] = delimiter

        def page_after(marker: str) -> listing.Page:
            more = {"marker": marker} if marker else {}
            request = replace(self._request("GET", "", {**query, **more}), subject=self.url_of(prefix))
            response = self._send(request)
            try:
                return _page(xml_document.parse(response.body))
            except ValueError as error:
                raise listing.unreadable(request.subject, error) from None

        return listing.entries(self.url_of(""), prefix, page_after)

    def head(self, key: str) -> ObjectInfo:
        """Return a blob's size and tag."""
        return info_of(self.url_of(key), self._send(self._request("HEAD", key)))

    def access(self, key: str) -> Access:
        """Return what requests for the blob need."""
        secret = self.secrets.current()
        lifetime_s = secret.lifetime_s(time.time(), MOST_ACCESS_S)
        signed = self._signed(self._request("GET", key), secret, "r", lifetime_s)
        return Access(signed.url, dict(signed.headers), lifetime_s)

    def address(self, key: str) -> str:
        """Return the URL of a blob, without what signs it."""
        return self._request("GET", key).url

    def put(self, key: str, body: bytes | memoryview) -> ObjectInfo:
        """Write a small blob whole."""
        headers = {"x-ms-blob-type": "BlockBlob", "content-md5": checksums.md5_base64(body)}
        request = self._request("PUT", key, {}, headers, body)
        return ObjectInfo(self.url_of(key), memoryview(body).nbytes, written_tag(request, self._send(request)))

    def upload(self, key: str, size_bytes: int) -> AzureUpload:
        """Begin to write a large blob in blocks."""
        return AzureUpload(self, key, size_bytes)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete blobs, some at a time."""
        in_threads(self._delete_one, keys)

    def put_block(self, key: str, block: str, body: bytes | memoryview) -> None:
        """Send a block of a blob, which appears with `put_blocks`."""
        query = {"comp": "block", "blockid": block}
        self._send(self._request("PUT", key, query, {"content-md5": checksums.md5_base64(body)}, body))

    def put_blocks(self, key: str, blocks: Iterable[str]) -> str:
        """Make a blob of blocks, and return its tag."""
        body = f"<BlockList>{''.join(f'<Latest>{block}</Latest>' for block in blocks)}</BlockList>".encode()
        headers = {"content-type": "application/xml", "content-md5": checksums.md5_base64(body)}
        request = self._request("PUT", key, {"comp": "blocklist"}, headers, body)
        return written_tag(request, self._send(request))

    def _delete_one(self, key: str) -> None:
        request = self._request("DELETE", key, {}, {"x-ms-delete-snapshots": "include"})
        response = self._send(request, accept=(404,))
        if response.status == 404 and response.headers.get("x-ms-error-code") != "BlobNotFound":
            raise transport.refused(request, response)

    def _request(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
    ) -> Request:
        if not listing.is_plain(key):
            raise ValueError(f"{self.url_of(key)}: a key with a part '.' or '..' cannot be reached through a URL")
        url = f"{self._url}/{sigv4.encode_key(key)}" if key else self._url
        if query:
            url += f"?{sigv4.query_of(query)}"
        return Request(method, url, {"x-ms-version": _VERSION, **(headers or {})}, body, self.url_of(key))

    def _send(self, request: Request, accept: Collection[int] = ()) -> Response:
        return transport.send(request, self._sign, accept=accept, renew=self.secrets.distrust)

    def _sign(self, request: Request) -> Request:
        return self._signed(request, self.secrets.current(), "racwdl", _SIGNATURE_S)

    def _signed(self, request: Request, secret: Secret, permissions: str, lifetime_s: float) -> Request:
        if isinstance(secret, Token):
            return replace(request, headers={**request.headers, "authorization": f"Bearer {secret.token}"})
        if isinstance(secret, SharedAccess):
            signature = secret.sas.lstrip("?")
        elif isinstance(secret, AccountKey):
            signature = shared_access(self._account, self.container, secret.account_key, permissions, lifetime_s)
        else:
            return request
        return replace(request, url=f"{request.url}{'&' if '?' in request.url else '?'}{signature}")


class AzureUpload:
    """A blob that is written in blocks: see `gdsdata.storage.store.Upload`.

    Azure deletes blocks that no blob has after a week. Nothing can delete them before.
    """

    def __init__(self, store: AzureStore, key: str, size_bytes: int) -> None:
        self.part_bytes = part_bytes_of(size_bytes, _MOST_BLOCKS)
        self._store = store
        self._key = key
        self._size_bytes = size_bytes
        self._name = random_bytes.token_hex(8)  # no blocks of another upload of the same blob are taken
        self._lock = threading.Lock()  # guards _sent
        self._sent: set[int] = set()

    def send(self, number: int, body: memoryview) -> None:
        """Send part ``number``, counted from 0."""
        self._store.put_block(self._key, self._block(number), body)
        with self._lock:
            self._sent.add(number)

    def complete(self) -> ObjectInfo:
        """Make the blob appear."""
        url = self._store.url_of(self._key)
        count = -(-self._size_bytes // self.part_bytes)
        with self._lock:
            wrong = sorted(set(range(count)) ^ self._sent)
        if wrong:
            raise ValueError(f"{url}: has {count} parts, but part {wrong[0]} was not sent")
        tag = self._store.put_blocks(self._key, map(self._block, range(count)))
        return ObjectInfo(url, self._size_bytes, tag)

    def abort(self) -> None:
        """Forget the blocks. Raises nothing."""

    def _block(self, number: int) -> str:
        return base64.b64encode(f"{self._name}-{number:06d}".encode()).decode()


def shared_access(account: str, container: str, key: str, permissions: str, lifetime_s: float) -> str:
    """Return a signature for a container's blobs, as a URL's query, made with the account's key.

    Source: Microsoft, "Create a service SAS", version 2020-12-06 and later.

    Raises:
        PermissionError: the key is no base64.
    """
    try:
        secret = base64.b64decode(key, validate=True)
    except ValueError:
        raise PermissionError(f"the key of the account {account} is no base64: copy it again") from None
    end = datetime.fromtimestamp(time.time() + lifetime_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    resource = f"/blob/{account}/{container}"
    # Permissions, start, end, resource, identifier, IP, protocol, version, kind, snapshot,
    # encryption scope, and five headers of the response.
    fields = [permissions, "", end, resource, "", "", "", _VERSION, "c", "", "", "", "", "", "", ""]
    signature = base64.b64encode(hmac.digest(secret, "\n".join(fields).encode(), "sha256")).decode()
    return sigv4.query_of({"sp": permissions, "se": end, "sv": _VERSION, "sr": "c", "sig": signature})


def _page(root: Element) -> listing.Page:
    if root.tag != "EnumerationResults":
        raise ValueError(f"is a document {ascii(root.tag[:60])}")
    page = listing.Page(next_page=xml_document.text_of(root, "NextMarker"))
    for blob in root.iterfind("Blobs/Blob"):
        if xml_document.text_of(blob, "Properties/ResourceType") == "directory":
            continue
        size = xml_document.text_of(blob, "Properties/Content-Length")
        tag = xml_document.text_of(blob, "Properties/Etag")
        if not (size.isdecimal() and len(size) < 19):
            raise ValueError(f"has a blob of size {ascii(size[:40])}")
        page.objects.append((_name_of(blob), int(size), tag))
    page.prefixes = [_name_of(prefix) for prefix in root.iterfind("Blobs/BlobPrefix")]
    return page


def _name_of(element: Element) -> str:
    name = element.find("Name")
    text = xml_document.text_of(element, "Name")
    return unquote(text) if name is not None and name.get("Encoded") == "true" else text
