"""One HTTP exchange by Python's standard library, over kept connections and proxies."""

from __future__ import annotations

import functools
import http.client
import os
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from gdsdata.storage.fork_safe import ForkSafeLock

_MOST_IDLE = 32  # connections to one server
_CHUNK_BYTES = 1 << 18


class _Place(NamedTuple):
    """Where connections lead: a server, and the proxy before it ("" without one)."""

    scheme: str
    host: str
    port: int
    proxy: str


_lock = ForkSafeLock()  # guards _idle
_idle: dict[_Place, list[http.client.HTTPConnection]] = {}


os.register_at_fork(after_in_child=_idle.clear)  # closes the child's copies of the descriptors only


def exchange(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | memoryview,
    timeout_s: float,
    most_bytes: int,
) -> tuple[int, dict[str, str], bytes]:
    """Send a request once and return status, headers (names in lower case) and body.

    Redirects are not followed, and nothing is added to the headers but Host and Content-Length.

    Args:
        timeout_s: for the whole exchange.
        most_bytes: a longer body is cut to one byte more than that.

    Raises:
        OSError: the server cannot be reached, the connection broke, or the body is shorter than
            the headers say. ``TimeoutError``, ``ssl.SSLError`` and others where they apply.
    """
    end = time.monotonic() + timeout_s
    place = _place_of(url)
    with _lock:
        kept = _idle.get(place)
        connection = kept.pop() if kept else None
    try:
        if connection is not None:
            try:
                return _exchange_over(connection, place, method, url, headers, body, end, most_bytes)
            except ConnectionError:
                pass  # the server closed it while it was idle
        connection = _connection_to(place, end)
        return _exchange_over(connection, place, method, url, headers, body, end, most_bytes)
    except http.client.HTTPException as error:
        raise ConnectionError(f"the response is no HTTP: {type(error).__name__}") from None
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "the host's name is wrong") from None


def _exchange_over(
    connection: http.client.HTTPConnection,
    place: _Place,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | memoryview,
    end: float,
    most_bytes: int,
) -> tuple[int, dict[str, str], bytes]:
    is_done = False
    try:
        _set_timeout(connection, end)
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if place.proxy and place.scheme == "http":
            target = f"http://{parts.netloc}{target}"
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        names = {name.lower() for name in headers}
        if "host" not in names:
            connection.putheader("Host", parts.netloc)
        if "content-length" not in names and (method in ("PUT", "POST") or len(body)):
            connection.putheader("Content-Length", str(memoryview(body).nbytes))
        if place.proxy and place.scheme == "http":
            for name, value in _proxy_headers(place.proxy).items():
                connection.putheader(name, value)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        if len(body):
            _set_timeout(connection, end)
            connection.send(body)
        _set_timeout(connection, end)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        content = _body_of(response, connection, end, most_bytes)
        length = found.get("content-length", "")
        if method != "HEAD" and length.isdecimal() and len(content) < min(int(length), most_bytes):
            raise ConnectionError(f"the body ended after {len(content)} of {length} bytes")
        is_done = (response.isclosed() or response.length == 0) and not response.will_close
        response.close()
        return response.status, found, content
    finally:
        if is_done:
            with _lock:
                kept = _idle.setdefault(place, [])
                is_done = len(kept) < _MOST_IDLE
                if is_done:
                    kept.append(connection)
        if not is_done:
            connection.close()


def _body_of(
    response: http.client.HTTPResponse, connection: http.client.HTTPConnection, end: float, most_bytes: int
) -> bytes:
    content = bytearray()
    while len(content) <= most_bytes:
        _set_timeout(connection, end)
        chunk = response.read1(min(_CHUNK_BYTES, most_bytes + 1 - len(content)))
        if not chunk:
            break
        content += chunk
    return bytes(content)


def _set_timeout(connection: http.client.HTTPConnection, end: float) -> None:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time allowed for one attempt is over")
    connection.timeout = left
    if connection.sock is not None:
        connection.sock.settimeout(left)


def _place_of(url: str) -> _Place:
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = {} if proxy_bypass(parts.netloc) else getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    return _Place(parts.scheme, host, parts.port or (443 if parts.scheme == "https" else 80), proxy)


def _connection_to(place: _Place, end: float) -> http.client.HTTPConnection:
    timeout = max(0.01, end - time.monotonic())
    host, port = place.host, place.port
    if place.proxy:
        proxy = urlsplit(place.proxy)
        if proxy.scheme != "http":
            raise OSError(f"the proxy {proxy.scheme}://{proxy.hostname} is no http:// proxy, and others are not used")
        host, port = proxy.hostname or "", proxy.port or 80
    if place.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout)
    connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=_tls())
    if place.proxy:
        connection.set_tunnel(place.host, place.port, headers=_proxy_headers(place.proxy))
    return connection


@functools.lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads SSL_CERT_FILE and SSL_CERT_DIR


def _proxy_headers(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
