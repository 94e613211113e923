"""Requests to servers, beside the engine's own ranges: lists, sizes, small reads, and writes."""

from __future__ import annotations

import errno
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from gdsdata.errors import IoError
from gdsdata.observe.counted import store_requests
from gdsdata.storage import failures
from gdsdata.storage.exchange import exchange as _attempt

MOST_BYTES = 16 * 2**20
DEADLINE_S = 180.0
# One attempt may take this long, and longer by the time that its body takes at the slowest rate.
_ATTEMPT_S, _SLOWEST_BYTES_PER_S = 30.0, 500_000.0
# The wait before a retry is drawn from 0 to FIRST * 2**n, at most MOST ("full jitter").
_FIRST_WAIT_S, _MOST_WAIT_S = 0.1, 20.0
# A server that was not reached once is most likely a wrong address.
_UNREACHED = (socket.gaierror, ConnectionRefusedError, ssl.SSLError)
_UNREACHED_S = 12.0
_MOST_ASKED_S = 24 * 3600.0  # by a date in Retry-After
_MOST_MOVES = 5
# Headers that signing adds, and that everybody may see.
_NO_SECRETS = {"host", "date", "x-amz-date", "x-goog-date", "x-ms-date", "x-ms-version", "x-amz-content-sha256"}

# Gateways have statuses of their own, from 520 on.
_RETRIED = {408, 425, 429, 500, 502, 503, 504, *range(520, 600)}
_RETRIED_CODES = {
    "InternalError",
    "OperationAborted",
    "OperationTimedOut",
    "RequestTimeout",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
}

# The body was damaged on its way. If it is so again and again, it is damaged here.
_DAMAGED_CODES = {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "Md5Mismatch"}
_MOST_DAMAGED = 4

# The secret has expired: it is renewed once.
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}

# Shorter words of a signature are no secrets, and may be words of any message.
_LEAST_HIDDEN = 8

# As csrc/backend/http_head.cpp parses it.
_CONTENT_RANGE = re.compile(r"bytes +(\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII | re.IGNORECASE)

_clock = time.monotonic
_sleep = time.sleep
_draw = random.uniform


@dataclass(frozen=True)
class Request:
    """A request before it is signed.

    Attributes:
        url: percent-encoded.
        subject: what the user calls the object, for errors.
    """

    method: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | memoryview = field(default=b"", repr=False)
    subject: str = ""


class ContentRange(NamedTuple):
    """The bytes of an object that a response has: ``last`` is one of them. No ``total`` is None."""

    first: int
    last: int
    total: int | None


@dataclass(frozen=True)
class Response:
    """An answer.

    Attributes:
        headers: names in lower case.
        attempts: how often the request was sent.
        hidden: what signed the request: see `Refusal`.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    attempts: int = 1
    hidden: Collection[str] = field(default=(), repr=False)

    @property
    def content_range(self) -> ContentRange | None:
        """The bytes that Content-Range names, or None: it is missing, or names none."""
        said = _CONTENT_RANGE.fullmatch(self.headers.get("content-range", "").strip())
        return ContentRange(int(said[1]), int(said[2]), None if said[3] == "*" else int(said[3])) if said else None


def unsigned(request: Request) -> Request:
    """Sign nothing."""
    return request


def send(
    request: Request,
    sign: Callable[[Request], Request] = unsigned,
    *,
    accept: Collection[int] = (),
    moved: Callable[[Request, Response], Request | None] | None = None,
    renew: Callable[[], None] | None = None,
    result: bytes = b"",
    may_be_cut: bool = False,
    most_bytes: int = MOST_BYTES,
    deadline_s: float = DEADLINE_S,
) -> Response:
    """Send a request until it succeeds, is refused, or the deadline is over.

    Args:
        sign: returns the request to send. It is called at each attempt, so signatures and tokens
            are new ones.
        accept: statuses beside 2xx that are returned and raise nothing.
        moved: returns the request to send in place of one that was answered with a redirect or
            400, or None.
        renew: is called once if the server says that the secret has expired. Then the request is
            signed again.
        result: the body of a success has this. Other bodies of a 200 have an error, as that of
            CompleteMultipartUpload may, or no outcome. Then the request is sent again.
        may_be_cut: return the beginning of a body that is longer than ``most_bytes``.

    Raises:
        FileNotFoundError: 404 or 410.
        PermissionError: 401 or 403.
        IoError: everything else.
    """
    begun = _clock()
    was_reached, moves, attempts = False, 0, 0
    while True:
        attempts += 1
        left = begun + deadline_s - _clock()
        refusal = error = None
        sent = sign(request)
        try:
            response = _once(request, sent, min(max(left, 0.1), _attempt_s(sent)), most_bytes, attempts)
        except OSError as caught:
            error = caught
            wait_s, is_retried = 0.0, not _is_final(caught)
            was_reached = was_reached or not isinstance(caught, _UNREACHED)
            limit_s = deadline_s if was_reached else min(deadline_s, _UNREACHED_S)
        else:
            was_reached, limit_s = True, deadline_s
            refusal = _refusal(response, result)
            if refusal is None:
                store_requests.count(attempts, memoryview(request.body).nbytes, len(response.body))
                return _whole(request, response, most_bytes, may_be_cut)
            elsewhere = moved(request, response) if moved and moves < _MOST_MOVES and _is_move(response) else None
            if elsewhere is not None:
                request, moves = elsewhere, moves + 1
                continue
            is_expired = refusal.code in _EXPIRED_CODES or response.status == 401
            if renew and is_expired:
                renew()
                renew = None
                continue
            if response.status in accept:
                store_requests.count(attempts, 0, len(response.body))
                return response
            wait_s = _asked_wait_s(response.headers)
            is_retried = response.status in _RETRIED or refusal.code in _RETRIED_CODES
            is_retried |= refusal.code in _DAMAGED_CODES and attempts < _MOST_DAMAGED
            is_retried |= 200 <= response.status < 300 and not refusal.code  # it has no outcome
        wait_s = max(wait_s, _draw(0.0, min(_MOST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(attempts - 1, 20))))
        passed_s = _clock() - begun
        if not is_retried or passed_s + wait_s >= limit_s:
            store_requests.count(attempts, 0, 0)
            history = f"{attempts} attempt{'s' if attempts > 1 else ''} in {passed_s:.1f} s"
            if refusal is not None:
                shown = f"after {history}" if attempts > 1 else ""
                raise failures.refused(request.subject or request.url, request.method, request.url, refusal, shown)
            assert error is not None
            # The cause is not chained: its text may have the signed URL.
            raise failures.unreachable(
                request.subject or request.url, request.method, request.url, error, history
            ) from None
        _sleep(wait_s)


def refused(request: Request, response: Response) -> OSError:
    """Return the error for a response that was accepted, but is no success for the caller."""
    refusal = failures.refusal_of(response.status, response.headers, response.body, response.hidden)
    return failures.refused(request.subject or request.url, request.method, request.url, refusal)


def is_passing(response: Response) -> bool:
    """Return whether a refusal is none of the request: its body was damaged, or the server busy."""
    return failures.refusal_of(response.status, response.headers, response.body).code in _DAMAGED_CODES | _RETRIED_CODES


def _once(request: Request, sent: Request, timeout_s: float, most_bytes: int, attempts: int) -> Response:
    status, headers, body = _attempt(sent.method, sent.url, sent.headers, sent.body, timeout_s, most_bytes)
    return Response(status, headers, body, attempts, _added_by_signing(request, sent))


def _attempt_s(request: Request) -> float:
    return _ATTEMPT_S + memoryview(request.body).nbytes / _SLOWEST_BYTES_PER_S


def _refusal(response: Response, result: bytes) -> failures.Refusal | None:
    if 200 <= response.status < 300 and result in response.body:
        return None
    return failures.refusal_of(response.status, response.headers, response.body, response.hidden)


def _added_by_signing(request: Request, sent: Request) -> list[str]:
    """Return the words that only the signed request has, in its headers and its query."""
    words = set()
    for name, value in sent.headers.items():
        if request.headers.get(name) != value and name.lower() not in _NO_SECRETS:
            _, _, behind = value.partition(" ")  # of "Bearer TOKEN", the token
            words.update((behind or value).split())
    unsigned_query, query = urlsplit(request.url).query, urlsplit(sent.url).query
    if query != unsigned_query:
        added = set(parse_qsl(query)) - set(parse_qsl(unsigned_query))
        words.update(form for _, value in added for form in (value, quote(value, safe="")))
    return sorted((word for word in words if len(word) >= _LEAST_HIDDEN), key=len, reverse=True)


def _is_final(error: OSError) -> bool:
    """Return whether another attempt would fail alike: a bad certificate, or a malformed URL."""
    return isinstance(error, ssl.SSLCertVerificationError) or error.errno == errno.EINVAL


def _is_move(response: Response) -> bool:
    return response.status in (301, 302, 303, 307, 308, 400)


def _whole(request: Request, response: Response, most_bytes: int, may_be_cut: bool) -> Response:
    if len(response.body) <= most_bytes:
        return response
    if may_be_cut:
        return replace(response, body=response.body[:most_bytes])
    subject = failures.shown_url(request.subject or request.url)
    raise IoError(
        5,
        f"{subject}: {request.method} {failures.shown_url(request.url)} was answered with more than {most_bytes} "
        "bytes, which is no answer of a sound server. Check the URL and endpoint_url.",
        subject,
    )


def _asked_wait_s(headers: Mapping[str, str]) -> float:
    """Return how long the server wants us to wait, by Retry-After."""
    value = headers.get("retry-after", "")
    if value.isdecimal():
        return min(float(value), 1e6)
    until_s = failures.time_of(value)
    if until_s is None:
        return 0.0
    theirs_s = failures.time_of(headers.get("date", ""))  # this machine's clock may be wrong
    if theirs_s is None or until_s - theirs_s > _MOST_ASKED_S:  # the server has none that is right
        theirs_s = time.time()
    return min(max(0.0, until_s - theirs_s), 1e6)
