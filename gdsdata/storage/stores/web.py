"""``http://`` and ``https://``: objects that any server offers, to read."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from gdsdata.errors import CorruptData, IoError
from gdsdata.storage import credentials, listing, transport, web_urls
from gdsdata.storage.failures import shown_url
from gdsdata.storage.options import check_options
from gdsdata.storage.secret import Anonymous, NotPickled, Secret, Token
from gdsdata.storage.store import Access, ObjectInfo, Upload
from gdsdata.storage.stores.xml_store import MOST_ACCESS_S, in_threads, info_of
from gdsdata.storage.transport import Request, Response
from gdsdata.storage.urls import without_query

OPTIONS: dict[str, type | tuple[type, ...]] = {"headers": Mapping, "credentials": object}
_HEADS_AT_ONCE = 256


def make(bucket: str, scheme: str, options: Mapping[str, Any]) -> WebStore:
    """Return the store of a host.

    Args:
        bucket: the host, with its port if that is another one.
        options: ``headers`` to send with each request to this host, and ``credentials``: a bearer
            token, see `gdsdata.storage.credentials.given`.

    Raises:
        ValueError: an option or the host is wrong.
    """
    check_options(scheme, options, OPTIONS)
    if "@" in bucket:
        shown = bucket.rpartition("@")[2]
        raise ValueError(f"{scheme}://{shown}: has a user in the URL: pass headers={{'Authorization': ...}} instead")
    try:
        urlsplit(f"{scheme}://{bucket}")
    except ValueError as error:
        shown = bucket.partition("?")[0]
        raise ValueError(f"{scheme}://{shown}: the host cannot be one: {error}. Check the URL") from None
    headers = {str(name): str(value) for name, value in (options.get("headers") or {}).items()}
    return WebStore(bucket, scheme, headers, credentials.given(options.get("credentials"), [Token], scheme))


class WebStore(NotPickled):
    """The objects of one host, to read: see `gdsdata.storage.store.Store`.

    A key is what follows the host in the URL, also a query. It is sent as it is: only characters
    that no URL may have are percent-encoded.
    """

    def __init__(
        self, bucket: str, scheme: str, headers: Mapping[str, str], secrets: credentials.Credentials | None
    ) -> None:
        self._url = f"{scheme}://{bucket}/"
        self._headers = dict(headers)
        self._secrets = secrets

    def __repr__(self) -> str:
        return f"WebStore({self._url})"

    def list(self, prefix: str, delimiter: str = "") -> Iterator[ObjectInfo | str]:
        """Yield the objects that an index file names, in its order.

        Args:
            prefix: the key of a text file. Each line is a URL, or a name relative to it; empty
                lines and those that begin with # are skipped.
            delimiter: is not used.

        Raises:
            ValueError: ``prefix`` names no such file: a web server has no list.
        """
        request = self._request("GET", self._url + prefix)
        response = self._send(request)
        urls = _lines(request.url, response)
        for first in range(0, len(urls), _HEADS_AT_ONCE):
            yield from in_threads(self._head, urls[first : first + _HEADS_AT_ONCE])

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size and tag."""
        return self._head(self._url + key)

    def access(self, key: str) -> Access:
        """Return what requests for the object need."""
        secret = self.secret()
        headers = {**self._headers, **_token(secret)}
        lifetime_s = secret.lifetime_s(time.time(), MOST_ACCESS_S)
        return Access(web_urls.encoded(self._url + key), headers, lifetime_s)

    def doubt_secret(self, age_s: float) -> None:
        """Renew the token, if there is one: see `Store.doubt_secret`."""
        if self._secrets:
            self._secrets.doubt(age_s)

    def address(self, key: str) -> str:
        """Return the URL of an object, without its query: that may be a signature."""
        return without_query(web_urls.encoded(self._url + key))

    def secret(self) -> Secret:
        """Return the token that requests have, if they have one."""
        return self._secrets.current() if self._secrets else Anonymous(source="none: http needs none")

    def put(self, key: str, body: bytes | memoryview) -> ObjectInfo:
        """Raise IoError: nothing is written by HTTP."""
        self._refuse(key)

    def upload(self, key: str, size_bytes: int) -> Upload:
        """Raise IoError: nothing is written by HTTP."""
        self._refuse(key)

    def delete(self, keys: Iterable[str]) -> None:
        """Raise IoError: nothing is deleted by HTTP."""
        for key in keys:
            self._refuse(key)

    def _head(self, url: str) -> ObjectInfo:
        response = self._send(self._request("HEAD", url), accept=(400, 403, 405, 501))
        if response.status < 300 and "content-length" in response.headers:
            return info_of(url, response)
        # URLs that are signed for GET, and some servers, refuse HEAD.
        request = self._request("GET", url)
        response = self._send(replace(request, headers={**request.headers, "range": "bytes=0-0"}), accept=(416,))
        if response.status == 206:  # its Content-Length is that of the part
            part = response.content_range
            total = "" if part is None or part.total is None else str(part.total)
            response = replace(response, headers={**response.headers, "content-length": total})
        elif response.status == 416:  # an empty object
            if response.headers.get("content-range", "").strip().lower() != "bytes */0":
                raise transport.refused(request, response)
            response = replace(response, headers={**response.headers, "content-length": "0"})
        return info_of(url, response)

    def _request(self, method: str, url: str) -> Request:
        return Request(method, web_urls.encoded(url), {}, b"", url)

    def _send(self, request: Request, accept: Iterable[int] = ()) -> Response:
        return transport.send(
            request,
            self._sign,
            accept=tuple(accept),
            moved=web_urls.redirected,
            renew=self._secrets.distrust if self._secrets else None,
            may_be_cut="range" in request.headers,
        )

    def _sign(self, request: Request) -> Request:
        """Add this host's headers, to requests that go to this host."""
        if not request.url.startswith(self._url):
            return request
        secret = self.secret()
        return replace(request, headers={**self._headers, **request.headers, **_token(secret)})

    def _refuse(self, key: str) -> NoReturn:
        url = shown_url(self._url + key)
        raise IoError(errno.EROFS, f"{url}: gdsdata writes nothing to web servers: write to s3://, gs:// or az://", url)


def _token(secret: Secret) -> dict[str, str]:
    return {"authorization": f"Bearer {secret.token}"} if isinstance(secret, Token) else {}


def _is_web_url(name: str) -> bool:
    try:
        return bool(urlsplit(name).hostname)
    except ValueError:  # such as http://[
        return False


def _is_below(name: str) -> bool:
    """Return whether a relative name stays in its folder, also if a server decodes it."""
    path = name.partition("#")[0].partition("?")[0]
    is_plain = listing.is_plain(path) and listing.is_plain(unquote(path)) and "\0" not in unquote(name)
    return is_plain and not path.startswith("/") and ":" not in path.partition("/")[0]


def _lines(url: str, response: Response) -> list[str]:
    """Return the URLs that an index file names.

    Raises:
        ValueError: it is no text, or a page for people.
        CorruptData: a name leads out of the index file's folder.
    """
    shown = shown_url(url)
    try:
        text = response.body.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text or "html" in response.headers.get("content-type", "") or text.lstrip()[:1] in ("<", "{"):
        raise ValueError(
            f"{shown}: web servers have no list of their objects, and this is no index file. Name each URL, or a text "
            "file with a URL or a relative name a line."
        )
    folder = url.partition("?")[0].rpartition("/")[0] + "/"
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        is_whole = name.startswith(("http://", "https://"))
        if not (_is_web_url(name) if is_whole else _is_below(name)):
            raise CorruptData(
                f"{shown}, line {number}: {ascii(name[:200])} is no http URL and no name below the index file", shown
            )
        found.append(name if is_whole else folder + name)
    return found
