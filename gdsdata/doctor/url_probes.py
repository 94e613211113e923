"""Probes of a URL: what only requests to its server show.

They go by the engine's own client. Nothing that they return has a secret: no query, no header that
was sent, no user of a proxy.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import math
import os
import re
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from gdsdata.doctor.probes import attempt
from gdsdata.io import engine
from gdsdata.storage import failures
from gdsdata.storage.cache import Cache, is_cache
from gdsdata.storage.exchange import exchange
from gdsdata.storage.store import ObjectInfo, Store
from gdsdata.storage.stores import store_of

RANGE_BYTES = 65536
EXCHANGE_S = 8.0
ROUND_TRIPS = 5
# A step of the measurement has so many connections, and takes so long.
STEPS, STEP_S = (1, 4, 16, 64), 0.7
# A step that gains less ends the measurement.
_GAIN = 1.1
# Requests of one step take about this part of it, so that several are counted.
_REQUESTS_A_STEP = 4
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 2**18, 8 * 2**20
_LISTED = 100  # objects that the one to read is chosen from
_MOST_MOVES = 5
_MOVED = (301, 302, 303, 307, 308)
# As csrc/backend/curl_api.cpp and http_reactor.cpp have them.
_LIBRARIES = ("libcurl.so.4", "libcurl-gnutls.so.4", "libcurl-nss.so.4", "libcurl.so")
_CERTIFICATES = ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_KNOWS_RANGES = (7, 86)  # the first libcurl that knows ranges of addresses in NO_PROXY
_READ, _THROTTLED = (200, 206), (429, 503)


def libcurl(url: str) -> dict[str, Any]:
    """Return its version and that of its TLS library, or why it cannot be used."""
    refusal = engine.http_refusal()
    if refusal:
        return {"refusal": refusal}
    return {"version": _libcurl_words()}


def _libcurl_words() -> str:
    """Return what libcurl says of its version: "libcurl/7.88.1 OpenSSL/3.0.19 ..."."""
    for name in _LIBRARIES:
        with contextlib.suppress(OSError):
            version = ctypes.CDLL(name).curl_version
            version.restype = ctypes.c_char_p
            return str(version().decode(errors="replace"))
    return "libcurl"


def _libcurl_version() -> tuple[int, ...]:
    numbers = re.match(r"libcurl/(\d+)\.(\d+)", _libcurl_words())
    return tuple(map(int, numbers.groups())) if numbers else ()


def proxy(url: str) -> dict[str, Any]:
    """Return the proxy that requests go through, without its user and password."""
    name, value = proxy_of(_address(url))
    parts = urlsplit(value if "://" in value else f"http://{value}")
    return {"name": name, "proxy": f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if value else ""}


def proxy_of(address: SplitResult) -> tuple[str, str]:
    """Return the variable that names the proxy for an address, and its value; "" twice if none.

    libcurl ignores HTTP_PROXY, which a web server may set from a request's header.
    """
    names = ["http_proxy"] if address.scheme == "http" else ["https_proxy", "HTTPS_PROXY"]
    found = next((name for name in [*names, "all_proxy", "ALL_PROXY"] if os.environ.get(name)), "")
    beside = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if not found or passes_proxy(beside, address.hostname or "", _libcurl_version() >= _KNOWS_RANGES):
        return "", ""
    return found, os.environ[found]


def passes_proxy(no_proxy: str, host: str, knows_ranges: bool) -> bool:
    """Return whether libcurl makes requests to a host without the proxy.

    Args:
        no_proxy: the value of NO_PROXY: "*", or names, domains and addresses.
        host: a name or an address.
        knows_ranges: an entry such as 10.0.0.0/8 is a range of addresses.
    """
    if no_proxy.strip() == "*":
        return True
    entries = no_proxy.replace(",", " ").lower().split()
    if knows_ranges:
        with contextlib.suppress(ValueError):
            at = ipaddress.ip_address(host)
            return any(_has_address(entry, at) for entry in entries)
    return any(f".{host}".endswith(f".{entry.strip('.')}") for entry in entries if entry.strip("."))


def _has_address(entry: str, at: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    first, _, bits = entry.partition("/")
    try:
        if bits in ("", "0"):
            return at == ipaddress.ip_address(first)
        return bits.isdigit() and at in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def dns(url: str) -> dict[str, Any]:
    """Return the addresses of the server's name."""
    address = _address(url)
    began = time.perf_counter()
    try:
        found = socket.getaddrinfo(address.hostname, _port(address), type=socket.SOCK_STREAM)
    except OSError as error:
        return {"host": address.hostname, "error": str(error)}
    addresses = list(dict.fromkeys(one[4][0] for one in found))
    return {"host": address.hostname, "addresses": addresses, "took_s": time.perf_counter() - began}


def tls(url: str) -> dict[str, Any]:
    """Return the version of TLS, and the certificate's authority and end."""
    address = _address(url)
    if address.scheme != "https":
        return {"plain": True}
    if proxy_of(address)[0]:
        return {"proxied": True}
    variable = next((name for name in _CERTIFICATES if os.environ.get(name)), "")
    file = os.environ.get(variable, "")
    is_folder = os.path.isdir(file)
    try:
        context = ssl.create_default_context(
            cafile=None if is_folder else file or None, capath=file if is_folder else None
        )
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or str(error)
        return {"authorities_error": f"{variable} names '{file}', which cannot be read: {why}", "variable": variable}
    with socket.create_connection((address.hostname, _port(address)), timeout=EXCHANGE_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=address.hostname) as secure:
                version = secure.version()
                certificate: dict[str, Any] = dict(secure.getpeercert() or {})
        except ssl.SSLCertVerificationError as error:
            return {"certificate_error": error.verify_message, "authorities": file}
    issuer = {name: value for ((name, value), *_) in certificate.get("issuer", ())}
    return {
        "version": version,
        "issuer": issuer.get("organizationName") or issuer.get("commonName") or "",
        "ends": ssl.cert_time_to_seconds(certificate["notAfter"]),
        "authorities": file,
    }


def credentials(url: str) -> dict[str, Any]:
    """Return where the credentials come from, and when they end; never their value."""
    store, _ = store_of(url)
    secret = store.secret()
    ends = secret.expires_at if math.isfinite(secret.expires_at) else None
    return {"kind": type(secret).__name__, "source": secret.source, "ends": ends}


def one_range(url: str) -> dict[str, Any]:
    """Read the first bytes, and return what the server answered."""
    return dict(vars(_get(url, 0, RANGE_BYTES)[0]))


def region(url: str) -> dict[str, Any]:
    store, location = store_of(url)
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""
    host = urlsplit(store.address(location.key)).hostname
    return {"region": getattr(store, "region", ""), "named": named, "host": host}


def round_trip(url: str) -> dict[str, Any]:
    """Return how long a few requests for size and tag take, over a connection that is kept."""
    store, location = store_of(url)
    store.head(location.key)
    took = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        store.head(location.key)
        took.append(time.perf_counter() - began)
    return {"median_s": statistics.median(took), "least_s": min(took), "most_s": max(took)}


def object_to_read(url: str) -> dict[str, Any]:
    """Return the URL of an object: of a folder or a glob, the largest of the first ones."""
    store, location = store_of(url)
    prefix = location.key.partition("*")[0]
    if location.scheme.startswith("http") or (location.key == prefix and location.key and location.key[-1] != "/"):
        return {"url": ""}  # itself
    largest = None
    for count, found in enumerate(store.list(prefix)):
        if isinstance(found, ObjectInfo) and (largest is None or found.size_bytes > largest.size_bytes):
            largest = found
        if count == _LISTED:
            break
    if largest is None:
        return {"error": "there is no object below it"}
    return {"url": largest.url}


def cache(folder: str) -> dict[str, Any]:
    """Return the space at a cache's folder, or where it would be made, and what it holds."""
    there = os.path.abspath(folder)
    while not os.path.isdir(there) and there != "/":
        there = os.path.dirname(there)
    space = os.statvfs(there)
    found: dict[str, Any] = {
        "free_bytes": space.f_bavail * space.f_frsize,
        "is_there": there == os.path.abspath(folder),
        "may_write": os.access(there, os.W_OK | os.X_OK),
    }
    return found | ({"held": Cache(folder).statistics()} if is_cache(folder) else {})


# --- throughput -------------------------------------------------------------------------------------------------------


def throughput(url: str) -> dict[str, Any]:
    """Read ranges with a growing number of connections, each step for a moment."""
    first, way = _get(url, 0, RANGE_BYTES)
    if first.total_bytes < _LEAST_PIECE_BYTES:
        return {"bytes": first.total_bytes}
    rows: list[dict[str, Any]] = []
    piece_bytes = min(2**20, first.total_bytes)
    for connections in STEPS:
        step = _Step(way, first.total_bytes, piece_bytes)
        row = step.run(connections)
        rows.append(row)
        rate = row["gb_per_s"] * 1e9 / connections
        piece_bytes = int(min(max(rate * STEP_S / _REQUESTS_A_STEP, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES))
        piece_bytes = min(piece_bytes, first.total_bytes)
        if len(rows) > 1 and row["gb_per_s"] < _GAIN * rows[-2]["gb_per_s"]:
            break
    return {"rows": rows}


@dataclass(frozen=True)
class _Way:
    """An http(s) URL and headers that serve ranges of an object. They may be secrets."""

    url: str = field(repr=False)
    headers: dict[str, str] = field(repr=False)


class _Step:
    """Some connections that read pieces of an object until the time is over."""

    def __init__(self, way: _Way, total_bytes: int, piece_bytes: int) -> None:
        self._way, self._piece_bytes = way, piece_bytes
        self._pieces = max(1, total_bytes // piece_bytes)
        self._lock = threading.Lock()  # guards what follows
        self._begun = self._bytes = self._requests = self._throttled = self._failed = 0

    def run(self, connections: int) -> dict[str, Any]:
        ends_at = time.perf_counter() + STEP_S
        began = time.perf_counter()
        threads = [threading.Thread(target=self._read, args=(ends_at,), daemon=True) for _ in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {
            "connections": connections,
            "gb_per_s": self._bytes / 1e9 / (time.perf_counter() - began),
            "requests": self._requests,
            "throttled": self._throttled,
            "failed": self._failed,
        }

    def _read(self, ends_at: float) -> None:
        while time.perf_counter() < ends_at:
            with self._lock:
                begin = self._begun % self._pieces * self._piece_bytes
                self._begun += 1
            status, count = 0, 0
            with contextlib.suppress(OSError):
                said = f"bytes={begin}-{begin + self._piece_bytes - 1}"
                headers = {**self._way.headers, "range": said}
                status, _, body = exchange("GET", self._way.url, headers, b"", EXCHANGE_S / 2, self._piece_bytes)
                count = len(body) if status in _READ and len(body) <= self._piece_bytes else 0
            with self._lock:
                self._requests, self._bytes = self._requests + 1, self._bytes + count
                self._throttled += status in _THROTTLED
                self._failed += not count and status not in _THROTTLED


# --- one request ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    """An answer to a request for a range.

    Attributes:
        status: 0 if there was no answer.
        said: reason and request id of a refusal, or why there was no answer.
        bytes: of the body that were taken: one more than asked for, if there are more.
        length: of the body, as its header says.
        at_s: this machine's time in the middle of the request.
    """

    status: int = 0
    said: str = ""
    remedy: str = ""
    bytes: int = 0
    length: int = 0
    total_bytes: int = 0
    content_range: str = ""
    tag: str = ""
    server: str = ""
    request_id: str = ""
    date: str = ""
    region: str = ""
    took_s: float = 0.0
    at_s: float = 0.0


def _get(url: str, begin: int, end: int) -> tuple[_Answer, _Way]:
    """Ask once for a range, and follow the server to another URL or region."""
    store, location = store_of(url)
    way, has_asked = _way_of(store, location.key), False
    for _ in range(_MOST_MOVES):
        began, at_s = time.perf_counter(), time.time()
        headers = {**way.headers, "range": f"bytes={begin}-{end - 1}"}
        try:
            status, found, body = exchange("GET", way.url, headers, b"", EXCHANGE_S, end - begin)
        except OSError as error:
            said, remedy = failures.reason_of(way.url, error)
            return _Answer(said=said, remedy=remedy), way
        took_s = time.perf_counter() - began
        if status in (301, 307, 400) and "x-amz-bucket-region" in found and not has_asked:
            with contextlib.suppress(OSError):
                store.head(location.key)  # which follows to the region, and keeps it
            way, has_asked = _way_of(store, location.key), True
            continue
        target = urljoin(way.url, found.get("location", ""))
        if status not in _MOVED or "location" not in found or (way.url[:6] == "https:" and target[:6] != "https:"):
            break
        is_same_host = urlsplit(target).netloc == urlsplit(way.url).netloc
        way = _Way(target, way.headers if is_same_host else {})
    refusal = failures.refusal_of(status, found, body)
    reason = " ".join(filter(None, [refusal.code, refusal.message and f'"{refusal.message}"']))
    total, length = found.get("content-range", "").rpartition("/")[2], found.get("content-length", "")
    if status in _READ and not total:  # rclone answers a range so, with its bytes alone
        with contextlib.suppress(OSError):
            total = str(store.head(location.key).size_bytes)
    answer = _Answer(
        status=status,
        said=reason if status >= 300 else "",
        remedy=failures.remedy_of(refusal) if status >= 300 else "",
        bytes=len(body),
        length=int(length) if length.isdecimal() and len(length) < 19 else 0,
        total_bytes=int(total) if total.isdecimal() and len(total) < 19 else 0,
        content_range=found.get("content-range", ""),
        tag=found.get("etag", ""),
        server=found.get("server", ""),
        request_id=refusal.request_id,
        date=found.get("date", ""),
        region=found.get("x-amz-bucket-region", ""),
        took_s=took_s,
        at_s=at_s + took_s / 2,
    )
    return answer, way


def _way_of(store: Store, key: str) -> _Way:
    access = store.access(key)
    return _Way(access.url, access.headers)


def _address(url: str) -> SplitResult:
    store, location = store_of(url)
    return urlsplit(store.address(location.key))


def _port(address: SplitResult) -> int:
    return address.port or (443 if address.scheme == "https" else 80)


URL_PROBES: dict[str, Callable[[str], dict[str, Any]]] = {
    "libcurl": attempt(libcurl),
    "proxy": attempt(proxy),
    "dns": attempt(dns),
    "tls": attempt(tls),
    "credentials": attempt(credentials),
    "one_range": attempt(one_range),
    "region": attempt(region),
    "round_trip": attempt(round_trip),
    "throughput": attempt(throughput),
    "object_to_read": attempt(object_to_read),
    "cache": attempt(cache),
}
URL_LIMITS_S = {**dict.fromkeys(URL_PROBES, 15.0), "throughput": 30.0}
