"""The store by the XML interface of S3, which GCS has too."""

from __future__ import annotations

import base64
import errno
import hashlib
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element
from xml.sax.saxutils import escape

from gdsdata.errors import CorruptData, IoError
from gdsdata.storage import checksums, failures, listing, sigv4, transport, xml_document
from gdsdata.storage.credentials import Credentials
from gdsdata.storage.store import Access, ObjectInfo
from gdsdata.storage.stores.signing_store import SigningStore
from gdsdata.storage.transport import Request, Response

MOST_ACCESS_S = 12 * 3600.0
_PART_BYTES, _MOST_PARTS = 16 * 2**20, 10_000
_DELETED_AT_ONCE = 1000
_DELETING_THREADS = 16
_UPLOAD = "gdsdata-upload"
_XML = {"content-type": "application/xml"}


class XmlStore(SigningStore, ABC):
    """The objects of one bucket, by the XML interface of S3. See `gdsdata.storage.store.Store`.

    A subclass says where the bucket is, how requests are signed, and with which checksums.
    """

    metadata_prefix: str
    """Begins the names of headers that are kept with an object."""

    def __init__(self, scheme: str, bucket: str, secrets: Credentials) -> None:
        super().__init__(secrets)
        self.scheme = scheme
        self.bucket = bucket
        self._deletes_many = True  # until the server refuses it
        self._puts_crc32c = True  # the same; then with an MD5

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scheme}://{self.bucket})"

    # ------------------------------------------------------------------------- what services differ in

    @abstractmethod
    def bucket_url(self) -> str:
        """Return the bucket's http(s) URL, without a slash at its end."""

    @abstractmethod
    def sign(self, request: Request) -> Request:
        """Return a request with a new signature or token."""

    @abstractmethod
    def signed_access(self, url: str) -> Access:
        """Return the access to the object at an http(s) URL."""

    @abstractmethod
    def payload_headers(self, sha256: str) -> dict[str, str]:
        """Return the headers that have a body's SHA-256, in hex, or say that it is not signed."""

    @abstractmethod
    def crc32c_headers(self, crc32c: str) -> dict[str, str]:
        """Return the headers that have a body's CRC-32C, in base64."""

    def begin_headers(self) -> dict[str, str]:
        """Return the headers that announce CRC-32C for the parts of an upload."""
        return {}

    @abstractmethod
    def verifies_crc32c(self, begun: Response) -> bool:
        """Return whether an upload's parts are verified by CRC-32C."""

    def moved(self, request: Request, response: Response) -> Request | None:
        """Return the request to send elsewhere after a redirect, or None."""
        return None

    # ------------------------------------------------------------------------------------------- requests

    def url_of(self, key: str) -> str:
        """Return an object's URL as users write it."""
        return f"{self.scheme}://{self.bucket}/{key}"

    def request(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
    ) -> Request:
        """Return an unsigned request for an object, or for the bucket if ``key`` is empty."""
        if not listing.is_plain(key):
            raise ValueError(f"{self.url_of(key)}: a key with a part '.' or '..' cannot be reached through a URL")
        base = self.bucket_url()
        # A bucket in the path is named without a slash behind it: some servers find it only so.
        url = f"{base}/{sigv4.encode_key(key)}" if key or base.count("/") == 2 else base
        if query:
            url += f"?{sigv4.query_of(query)}"
        payload = self.payload_headers(checksums.sha256_hex(body)) if headers is None else {}
        return Request(method, url, {**payload, **(headers or {})}, body, self.url_of(key))

    def send(self, request: Request, accept: Collection[int] = (), result: bytes = b"") -> Response:
        """Send a signed request, with retries."""
        return transport.send(
            request,
            self.sign,
            accept=accept,
            moved=self.moved,
            renew=self.secrets.distrust,
            result=result,
        )

    def parsed(self, request: Request, response: Response) -> Element:
        """Return the root of an answer in XML.

        Raises:
            CorruptData: it is no XML.
        """
        try:
            return xml_document.parse(response.body)
        except ValueError as error:
            raise CorruptData(
                f"{request.subject}: the answer to {request.method} {error}. Check endpoint_url.", request.subject
            ) from None

    # ------------------------------------------------------------------------------------------- the store

    def list(self, prefix: str, delimiter: str = "") -> Iterator[ObjectInfo | str]:
        """Yield objects and common prefixes: see `Store.list`."""
        query = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
        if delimiter:
            query["delimiter"] = delimiter

        def page_after(marker: str) -> listing.Page:
            more = {"continuation-token": marker} if marker else {}
            request = replace(self.request("GET", "", {**query, **more}), subject=self.url_of(prefix))
            root = self.parsed(request, self.send(request))
            try:
                return _page(root)
            except ValueError as error:
                raise listing.unreadable(request.subject, error) from None

        return listing.entries(self.url_of(""), prefix, page_after)

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size and tag."""
        return info_of(self.url_of(key), self.headers_of(key))

    def headers_of(self, key: str) -> Response:
        """Return what HEAD says of an object."""
        request = self.request("HEAD", key)
        response = self.send(request, accept=(400, 403))
        if response.status >= 400:  # an answer to HEAD has no reason, but one to GET has
            first_byte = replace(request, method="GET", headers={**request.headers, "range": "bytes=0-0"})
            # Raises, unless the secret alone was the reason. An empty object has no first byte.
            self.send(first_byte, accept=(416,))
            self.secrets.distrust()
            response = self.send(request)
        return response

    def access(self, key: str) -> Access:
        """Return what requests for the object need."""
        return self.signed_access(self.request("GET", key).url)

    def address(self, key: str) -> str:
        """Return the URL of an object, without what signs it."""
        return self.request("GET", key).url

    def put(self, key: str, body: bytes | memoryview) -> ObjectInfo:
        """Write a small object whole."""
        signed = self.payload_headers(checksums.sha256_hex(body))

        def by_crc32c() -> Request:
            headers = {**signed, **self.crc32c_headers(checksums.crc32c_base64(body))}
            return self.request("PUT", key, headers=headers, body=body)

        def by_md5() -> Request:
            headers = {**signed, "content-md5": checksums.md5_base64(body)}
            return self.request("PUT", key, headers=headers, body=body)

        may_refuse = self._puts_crc32c and bool(self.begin_headers())
        request = by_crc32c() if self._puts_crc32c else by_md5()
        response = self.send(request, accept=(400, 501) if may_refuse else ())
        if response.status >= 400:  # perhaps the server does not know the checksum
            is_passing = transport.is_passing(response)
            request = request if is_passing else by_md5()
            response = self.send(request)
            self._puts_crc32c = is_passing
        return ObjectInfo(self.url_of(key), memoryview(body).nbytes, written_tag(request, response))

    def upload(self, key: str, size_bytes: int) -> XmlUpload:
        """Begin to write a large object in parts."""
        # Kept with the object, so a completion whose answer was lost is known.
        own = self.metadata_prefix + _UPLOAD, secrets.token_hex(16)
        headers = {**self.payload_headers(sigv4.EMPTY_SHA256), own[0]: own[1]}
        request = self.request("POST", key, {"uploads": ""}, {**headers, **self.begin_headers()})
        response = self.send(request, accept=(400, 501) if self.begin_headers() else ())
        if response.status >= 400:  # the server does not know the checksum
            request = self.request("POST", key, {"uploads": ""}, headers)
            response = self.send(request)
        upload_id = xml_document.text_of(self.parsed(request, response), "UploadId")
        if not upload_id:
            raise CorruptData(f"{request.subject}: the server began no upload. Check endpoint_url.", request.subject)
        return XmlUpload(self, key, size_bytes, upload_id, own, self.verifies_crc32c(response))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, a thousand a request if the server offers that."""
        waiting: list[str] = []
        for key in keys:
            waiting.append(key)
            if len(waiting) == _DELETED_AT_ONCE:
                self._delete(waiting)
                waiting = []
        if waiting:
            self._delete(waiting)

    def _delete(self, keys: Sequence[str]) -> None:
        if len(keys) > 1 and self._deletes_many and all(_is_xml_text(key) for key in keys):
            if self._delete_many(keys):
                return
            self._deletes_many = False
        in_threads(self._delete_one, keys)

    def _delete_many(self, keys: Sequence[str]) -> bool:
        """Delete in one request. Returns false if the server does not offer it."""
        listed = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
        body = f"<Delete>{listed}<Quiet>true</Quiet></Delete>".encode()
        headers = {
            **_XML,
            "content-md5": checksums.md5_base64(body),
            **self.payload_headers(checksums.sha256_hex(body)),
            **self.crc32c_headers(checksums.crc32c_base64(body)),
        }
        request = self.request("POST", "", {"delete": ""}, headers, body)
        response = self.send(request, accept=(400, 405, 411, 501))
        if response.status >= 400 or not response.body:  # an empty answer says nothing
            return False
        for error in self.parsed(request, response).iter("Error"):
            code = xml_document.text_of(error, "Code")
            if code != "NoSuchKey":
                key = xml_document.text_of(error, "Key")
                url = self.url_of(key if key in keys else "")
                said = failures.shown_text(code, 100, response.hidden)
                message = f"{url}: was not deleted: {said}. Check that the credentials allow it."
                if code == "AccessDenied":
                    raise failures.with_number(PermissionError(message), errno.EACCES)
                raise IoError(errno.EIO, message, url)
        return True

    def _delete_one(self, key: str) -> None:
        request = self.request("DELETE", key)
        response = self.send(request, accept=(404,))
        if response.status == 404 and b"NoSuchBucket" in response.body:
            raise transport.refused(request, response)


class XmlUpload:
    """An object that is written in parts: see `gdsdata.storage.store.Upload`."""

    def __init__(
        self, store: XmlStore, key: str, size_bytes: int, upload_id: str, own: tuple[str, str], by_crc32c: bool
    ) -> None:
        self.part_bytes = part_bytes_of(size_bytes)
        self._store = store
        self._key = key
        self._size_bytes = size_bytes
        self._id = upload_id
        self._own = own  # a header that the object has if this upload made it
        self._by_crc32c = by_crc32c
        self._lock = threading.Lock()  # guards _parts
        self._parts: dict[int, tuple[str, str]] = {}  # by number from 0: ETag, CRC-32C

    def send(self, number: int, body: memoryview) -> None:
        """Send part ``number``, counted from 0."""
        store = self._store
        query = {"partNumber": str(number + 1), "uploadId": self._id}
        crc32c = checksums.crc32c_base64(body) if self._by_crc32c else ""
        if crc32c:
            headers = {**store.payload_headers(sigv4.UNSIGNED), **store.crc32c_headers(crc32c)}
        else:
            headers = store.payload_headers(checksums.sha256_hex(body))
        request = store.request("PUT", self._key, query, headers, body)
        tag = written_tag(request, store.send(request))
        with self._lock:
            self._parts[number] = tag, crc32c

    def complete(self) -> ObjectInfo:
        """Make the object appear."""
        store = self._store
        count = max(1, -(-self._size_bytes // self.part_bytes))
        if self._size_bytes == 0 and not self._parts:
            self.send(0, memoryview(b""))
        with self._lock:
            parts = dict(self._parts)
        missing = sorted(set(range(count)) ^ set(parts))
        if missing:
            raise ValueError(f"{store.url_of(self._key)}: has {count} parts, but part {missing[0]} was not sent")
        written = "".join(_part_xml(number, *parts[number]) for number in range(count))
        body = f"<CompleteMultipartUpload>{written}</CompleteMultipartUpload>".encode()
        headers = {**_XML, **store.payload_headers(checksums.sha256_hex(body))}
        request = store.request("POST", self._key, {"uploadId": self._id}, headers, body)
        response = store.send(request, accept=(404,), result=b"CompleteMultipartUploadResult")
        if response.status == 404:
            # If an answer was lost, the retry finds the upload completed: then the object is there.
            tag = _tag_of_parts([tag for _, (tag, _) in sorted(parts.items())])
            if response.attempts == 1 or not self._is_there(tag):
                raise transport.refused(request, response)
        # Some servers (rclone) answer with another tag than the object then has.
        completed = store.head(self._key)
        if completed.size_bytes != self._size_bytes:
            raise CorruptData(
                f"{completed.url}: has {completed.size_bytes} bytes after its upload, but {self._size_bytes} were "
                "sent. Another program writes it too, or the server is damaged.",
                completed.url,
            )
        return completed

    def abort(self) -> None:
        """Delete the parts. Raises nothing."""
        try:
            request = self._store.request("DELETE", self._key, {"uploadId": self._id})
            self._store.send(request, accept=(404,))
        except Exception:
            pass  # the bucket's lifecycle rules delete them later

    def _is_there(self, tag: str) -> bool:
        """Return whether the object is the one that this upload makes.

        Args:
            tag: its ETag, if the server is S3. Other servers have others, but keep `_own`.
        """
        try:
            headers = self._store.headers_of(self._key).headers
        except FileNotFoundError:
            return False
        name, value = self._own
        return headers.get(name) == value or headers.get("etag", "").strip('"') == tag


def part_bytes_of(size_bytes: int, most_parts: int = _MOST_PARTS) -> int:
    """Return the size of parts: 16 MiB, or more, in whole MiB, so that there are few enough."""
    least = -(-size_bytes // most_parts)
    return max(_PART_BYTES, -(-least // 2**20) * 2**20)


def info_of(url: str, response: Response) -> ObjectInfo:
    """Return what the headers of an answer say of an object.

    Raises:
        CorruptData: they do not say its size.
    """
    length = response.headers.get("content-length", "")
    if not (length.isdecimal() and len(length) < 19):
        raise CorruptData(f"{url}: the server does not say the object's size (Content-Length, Content-Range).", url)
    return ObjectInfo(url, int(length), response.headers.get("etag") or response.headers.get("last-modified", ""))


def written_tag(request: Request, response: Response) -> str:
    """Return the ETag of what a request wrote.

    Raises:
        CorruptData: there is none, so the answer may be that of a proxy, and nothing was written.
    """
    tag = response.headers.get("etag", "")
    if not tag:
        message = f"{request.subject}: {request.method} was answered with {response.status} and no ETag, so it is not"
        raise CorruptData(f"{message} known to be written. Check endpoint_url, and proxies.", request.subject)
    return tag


def in_threads(work: Callable[[str], Any], keys: Iterable[str]) -> list[Any]:
    """Call ``work`` for each key, some at a time. Returns the results, in order."""
    named = list(keys)
    if len(named) < 2:
        return [work(key) for key in named]
    with ThreadPoolExecutor(min(_DELETING_THREADS, len(named)), "gdsdata-store") as pool:
        return list(pool.map(work, named))


def _page(root: Element) -> listing.Page:
    if root.tag != "ListBucketResult":
        raise ValueError(f"is a document {ascii(root.tag[:60])}")
    is_encoded = xml_document.text_of(root, "EncodingType") == "url"

    def key_of(element: Element, name: str) -> str:
        text = xml_document.text_of(element, name)
        return unquote_plus(text, errors="strict") if is_encoded else text

    page = listing.Page()
    for entry in root.iter("Contents"):
        size, tag = xml_document.text_of(entry, "Size"), xml_document.text_of(entry, "ETag")
        if not (size.isdecimal() and len(size) < 19):
            raise ValueError(f"has an object of size {ascii(size[:40])}")
        page.objects.append((key_of(entry, "Key"), int(size), tag or _date_of(entry)))
    page.prefixes = [key_of(entry, "Prefix") for entry in root.iter("CommonPrefixes")]
    if xml_document.text_of(root, "IsTruncated") == "true":
        page.next_page = xml_document.text_of(root, "NextContinuationToken")
        if not page.next_page:
            raise ValueError("goes on, but has no NextContinuationToken")
    return page


def _date_of(entry: Element) -> str:
    return listing.http_date(xml_document.text_of(entry, "LastModified"))


def _part_xml(number: int, tag: str, crc32c: str) -> str:
    checksum = f"<ChecksumCRC32C>{crc32c}</ChecksumCRC32C>" if crc32c else ""
    return f"<Part><PartNumber>{number + 1}</PartNumber><ETag>{escape(tag)}</ETag>{checksum}</Part>"


def _tag_of_parts(tags: list[str]) -> str:
    """Return S3's ETag for an object of parts: the MD5 of their MD5s, and their number."""
    try:
        joined = b"".join(base64.b16decode(tag.strip('"'), casefold=True) for tag in tags)
    except ValueError:
        return ""
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(tags)}"


def _is_xml_text(key: str) -> bool:
    return all(character >= " " and character not in "\ufffe\uffff" for character in key)
