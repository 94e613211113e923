"""The faults of the fault server, and which request gets which.

A fault is a function of an Exchange that returns whether the connection can go on. A Plan draws
from a seed and from the request itself, so that the order of arrival does not matter.
"""

import asyncio
import collections
import dataclasses
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from servers import fault_s3
from servers.fault_content import Content
from servers.fault_http import Connection, Request, Response


@dataclass
class Record:
    """One request as it went: `bytes` of the body were sent."""

    method: str
    key: str
    offset: int | None
    length: int
    connection: int
    fault: str = ""
    status: int = 0
    bytes: int = 0
    complete: bool = False


@dataclass
class Exchange:
    """A request, its right response, and how a fault may send another one."""

    request: Request
    response: Response
    connection: Connection
    content: Content
    plan: "Plan"
    record: Record

    def count(self, sent: int) -> None:
        self.record.bytes += sent

    async def send(self, response: Response | None = None, head: bytes | None = None) -> bool:
        """Send a response; True if the connection can be used again."""
        response = response or self.response
        self.record.status = response.status
        body = b"" if self.request.method == "HEAD" else response.body
        await self.connection.send((response.head() if head is None else head) + body)
        self.count(len(body))
        if self.request.method != "HEAD":
            await self.connection.send_pieces(response.pieces, self.count)
        self.record.complete = True
        return True

    async def send_part(self, share: float, **headers: str | None) -> None:
        """Send the head and the first bytes of the body."""
        self.record.status = self.response.status
        await self.connection.send(self.response.head(**headers))
        most = max(1, int(self.response.length * share))
        await self.connection.send_pieces(self.response.first_pieces(most), self.count)


Kind = Callable[[Exchange], Awaitable[bool]]
KINDS: dict[str, Kind] = {}
APPLY: dict[str, Callable[[Request, Response], bool]] = {}  # to which requests


def of_body(request: Request, response: Response) -> bool:
    return request.method == "GET" and bool(response.pieces)


def of_range(request: Request, response: Response) -> bool:
    return of_body(request, response) and response.status == 206


def of_write(request: Request, response: Response) -> bool:
    return request.method in ("PUT", "POST", "DELETE")


def of_any(request: Request, response: Response) -> bool:
    return True


def kind(applies: Callable[[Request, Response], bool]) -> Callable[[Kind], Kind]:
    def register(function: Kind) -> Kind:
        KINDS[function.__name__], APPLY[function.__name__] = function, applies
        return function

    return register


# --------------------------------------------------------------------------- connections


@kind(of_any)
async def reset_before(exchange: Exchange) -> bool:
    """A RST in place of a response; a write is not carried out."""
    await exchange.connection.reset()
    return False


@kind(of_write)
async def reset_after(exchange: Exchange) -> bool:
    """A RST in place of the response, after a write was carried out."""
    await exchange.connection.reset()
    return False


@kind(of_any)
async def close_before(exchange: Exchange) -> bool:
    """An orderly end in place of a response, as of a connection that was idle too long."""
    return False


@kind(of_body)
async def reset_within(exchange: Exchange) -> bool:
    await exchange.send_part(0.6)
    await exchange.connection.reset()
    return False


@kind(of_any)
async def silence(exchange: Exchange) -> bool:
    """No response at all."""
    await exchange.connection.until_closed(exchange.plan.stall_s)
    return False


@kind(of_body)
async def stall(exchange: Exchange) -> bool:
    """A part of the body, and then nothing."""
    await exchange.send_part(0.6)
    await exchange.connection.until_closed(exchange.plan.stall_s)
    return False


@kind(of_body)
async def slow(exchange: Exchange) -> bool:
    """All of the body, a few bytes at a time."""
    before = exchange.connection.bytes_per_s
    exchange.connection.bytes_per_s = exchange.plan.slow_bytes_per_s
    try:
        return await exchange.send()
    finally:
        exchange.connection.bytes_per_s = before


# --------------------------------------------------------------------------- bodies and headers


@kind(of_body)
async def short(exchange: Exchange) -> bool:
    """An end before Content-Length is reached."""
    await exchange.send_part(0.5)
    return False


@kind(of_body)
async def short_length(exchange: Exchange) -> bool:
    """A Content-Length that is less than Content-Range says, and as many bytes."""
    pieces = exchange.response.first_pieces(max(1, exchange.response.length // 2))
    return await exchange.send(dataclasses.replace(exchange.response, pieces=pieces))


@kind(of_range)
async def wrong_range(exchange: Exchange) -> bool:
    """Another range of the object than was asked for, said honestly."""
    found = exchange.content.objects[exchange.request.key]
    offset, length = exchange.request.range(found.size) or (0, found.size)
    other = offset + 1 if offset + 1 < found.size else max(0, offset - 1)
    return await exchange.send(fault_s3.ranged(found, (other, min(length, found.size - other))))


@kind(of_range)
async def whole(exchange: Exchange) -> bool:
    """The whole object with status 200."""
    return await exchange.send(fault_s3.ranged(exchange.content.objects[exchange.request.key], None))


@kind(of_range)
async def other_version(exchange: Exchange) -> bool:
    """A 206 with another version's ETag and bytes, whatever If-Match says."""
    found = exchange.content.objects[exchange.request.key]
    other = dataclasses.replace(found, version=found.version + 1000, etag=f"{found.etag[:-4]}beef", at=None)
    return await exchange.send(fault_s3.ranged(other, exchange.request.range(found.size)))


@kind(of_body)
async def chunked(exchange: Exchange) -> bool:
    """The right bytes, chunked, so that no header says how many."""
    length, exchange.record.status = exchange.response.length, exchange.response.status
    head = exchange.response.head(Content_Length=None, Transfer_Encoding="chunked")
    await exchange.connection.send(head + f"{length:x}\r\n".encode())
    await exchange.connection.send_pieces(exchange.response.pieces, exchange.count)
    await exchange.connection.send(b"\r\n0\r\n\r\n")
    exchange.record.complete = True
    return True


@kind(of_range)
async def compressed(exchange: Exchange) -> bool:
    """A body that a proxy has compressed: shorter than Content-Range says, and of no length."""
    head = exchange.response.head(Content_Length=None, Transfer_Encoding="chunked", Content_Encoding="gzip")
    body = b"\x1f\x8b" * -(-exchange.response.length // 4)
    await exchange.connection.send(head + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
    exchange.record.status, exchange.record.complete = exchange.response.status, True
    return True


@kind(of_any)
async def garbage_headers(exchange: Exchange) -> bool:
    """Bytes that are no HTTP."""
    await exchange.connection.send(
        b"HTTP/1.1 \xff\xfe\x00 ???\r\n\x01\x02 no colon\r\n: \r\nContent-Length: -7\r\n\r\n"
    )
    return False


@kind(of_any)
async def huge_headers(exchange: Exchange) -> bool:
    """A header of `huge_header_bytes`, and then the right response."""
    head = exchange.response.head(X_Huge="x" * exchange.plan.huge_header_bytes)
    return await exchange.send(head=head)


# --------------------------------------------------------------------------- errors


def of_status(name: str, status: int, code: str, applies: Callable = of_any, **headers: str) -> None:
    async def refuse(exchange: Exchange) -> bool:
        given = dict(headers)
        if "Retry_After" in given:
            given["Retry_After"] = str(exchange.plan.retry_after_s)
        return await exchange.send(fault_s3.error(status, code, **given))

    KINDS[name], APPLY[name] = refuse, applies


of_status("status_429", 429, "TooManyRequests")
of_status("status_429_retry_after", 429, "TooManyRequests", Retry_After="")
of_status("status_500", 500, "InternalError")
of_status("status_503", 503, "SlowDown")
of_status("status_503_retry_after", 503, "SlowDown", Retry_After="")
of_status("status_403", 403, "AccessDenied")
of_status("status_404", 404, "NoSuchKey")


@kind(of_any)
async def expired(exchange: Exchange) -> bool:
    """A 403 for this signature, from now on; a new one is good."""
    if exchange.request.signature is None:
        return await exchange.send()
    exchange.plan.expired_signatures.add(exchange.request.signature)
    return await exchange.send(expired_token())


def expired_token() -> Response:
    return fault_s3.error(403, "ExpiredToken", "The provided token has expired.")


@kind(lambda request, response: request.method == "POST" and "uploadId" in request.query)
async def error_in_200(exchange: Exchange) -> bool:
    """An error in a response of status 200, as S3 ends a multipart upload now and then."""
    refused = fault_s3.error(500, "InternalError")
    return await exchange.send(dataclasses.replace(refused, status=200))


# Faults that come instead of carrying a write out.
INSTEAD = {name for name in KINDS if name.startswith(("status_", "reset_before", "close_before"))} | {
    "silence", "expired", "error_in_200", "garbage_headers",
}  # fmt: skip


# --------------------------------------------------------------------------- which request gets which


@dataclass
class Plan:
    """Draws a fault for a request, or none.

    Attributes:
        share: of requests that get a fault.
        kinds: to draw from; those that cannot apply to a request are not drawn for it.
        in_a_row: the most faults of the same request (method, key and range); None: no bound.
        storm: a drawn fault is also that of as many requests behind it, whichever they are.
        keys: only requests whose key has this in it.
        scripted: faults of the next requests (whose key has this in it), before any is drawn.
    """

    seed: int = 0
    share: float = 0.0
    kinds: tuple[str, ...] = ()
    in_a_row: int | None = 2
    storm: int = 0
    keys: str = ""
    stall_s: float = 600.0
    slow_bytes_per_s: float = 50_000.0
    retry_after_s: int = 1
    huge_header_bytes: int = 2**20
    scripted: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kinds = tuple(self.kinds)
        unknown = [name for name in [*self.kinds, *(name for name, _ in self.scripted)] if name not in KINDS]
        if unknown:
            raise ValueError(f"unknown faults {unknown}; there are {', '.join(KINDS)}")
        self.seen: collections.Counter[str] = collections.Counter()
        self.in_storm: tuple[int, str] = (0, "")
        self.expired_signatures: set[str] = set()

    def draw(self, request: Request, applies: Callable[[str], bool]) -> str:
        """Return the fault of a request, or "". `applies` says which it can have."""
        for place, (name, key) in enumerate(self.scripted):
            if key in request.key and applies(name):
                del self.scripted[place]
                return name
        if self.keys not in request.key:
            return ""
        left, name = self.in_storm
        if left:
            self.in_storm = (left - 1, name)
            return name if applies(name) else ""
        identity = f"{request.method} {request.key} {request.query.get('partNumber')} {request.headers.get('range')}"
        self.seen[identity] += 1
        if self.in_a_row is not None and self.seen[identity] > self.in_a_row:
            return ""
        chance = random.Random(f"{self.seed} {self.seen[identity]} {identity}")
        fitting = list(filter(applies, self.kinds))
        if not fitting or chance.random() >= self.share:
            return ""
        name = chance.choice(fitting)
        self.in_storm = (self.storm, name)
        return name


def apply(names: Iterable[str]) -> tuple[str, ...]:
    """Return the faults of `names`, in which "all" stands for all."""
    return tuple(KINDS) if "all" in names else tuple(names)


async def carried_out(exchange: Exchange, fault: str) -> bool:
    """Send the response, or the fault in its place."""
    await asyncio.sleep(0)
    return await (KINDS[fault](exchange) if fault else exchange.send())
