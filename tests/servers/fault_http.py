"""HTTP/1.1 of the fault server: connections, requests and responses."""

import asyncio
import contextlib
import os
import socket
import struct
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field

from servers.fault_content import Piece

MOST_HEADER_BYTES = 65536
BURST_SECONDS = 0.01  # what a paced connection sends at once
LEAST_BURST, MOST_BURST = 2048, 2**20
REASONS = {
    200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified", 400: "Bad Request", 403: "Forbidden",
    404: "Not Found", 412: "Precondition Failed", 416: "Range Not Satisfiable", 429: "Too Many Requests",
    500: "Internal Server Error", 501: "Not Implemented", 503: "Slow Down",
}  # fmt: skip


class Disconnected(Exception):
    """The client has closed the connection, or reset it."""


@dataclass
class Request:
    method: str
    target: str  # path and query, as sent
    headers: dict[str, str]  # names in lower case
    body: bytes = b""

    def __post_init__(self) -> None:
        path, _, query = self.target.partition("?")
        self.key = urllib.parse.unquote(path).lstrip("/")
        self.query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))

    @property
    def signature(self) -> str | None:
        return self.query.get("X-Amz-Signature") or self.query.get("sig") or self.headers.get("authorization")

    @property
    def access_key(self) -> str:
        """The id of the key that signed a request of S3, or ""."""
        said = self.query.get("X-Amz-Credential") or self.headers.get("authorization", "").partition("Credential=")[2]
        return said.partition("/")[0]

    def range(self, size: int) -> tuple[int, int] | None:
        """Return offset and length, cut at the end of the object; None without a range.

        Raises:
            ValueError: the range is behind the end.
        """
        text = self.headers.get("range") or self.headers.get("x-ms-range", "")
        first, dash, last = text.removeprefix("bytes=").partition("-")
        if not dash or "," in last:
            return None
        if not first:
            length = min(int(last), size)
            return size - length, length
        start, end = int(first), min(int(last) if last else size - 1, size - 1)
        if start > end:
            raise ValueError("InvalidRange")
        return start, end - start + 1


@dataclass
class Response:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    pieces: list[Piece] = field(default_factory=list)  # in place of a body

    @property
    def length(self) -> int:
        return len(self.body) + sum(count for _, count in self.pieces)

    def head(self, **replaced: str | None) -> bytes:
        """Return status line and headers; a header that is replaced by None is left out."""
        headers: dict[str, str | None] = {"Content-Length": str(self.length), **self.headers}
        headers |= {name.replace("_", "-"): value for name, value in replaced.items()}
        lines = [f"{name}: {value}\r\n" for name, value in headers.items() if value is not None]
        return f"HTTP/1.1 {self.status} {REASONS[self.status]}\r\n{''.join(lines)}\r\n".encode()

    def first_pieces(self, count: int) -> list[Piece]:
        """Return the pieces of the body's first bytes."""
        found = []
        for at, length in self.pieces:
            if count > 0:
                found.append((at, min(length, count)))
                count -= length
        return found


class Connection:
    """A client's connection without TLS, paced at `bytes_per_s` unless that is 0."""

    def __init__(self, client: socket.socket, file: int, bytes_per_s: float) -> None:
        self.socket, self.file, self.bytes_per_s = client, file, bytes_per_s
        self.loop = asyncio.get_running_loop()
        self.received = bytearray()
        self.next_turn, self.counts = 0.0, True
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)

    # ------------------------------------------------------------------------------------------- receiving

    async def receive(self) -> None:
        try:
            data = await self.loop.sock_recv(self.socket, 2**18)
        except OSError as error:
            raise Disconnected from error
        if not data:
            raise Disconnected
        self.received += data

    async def read_until(self, end: bytes) -> bytes:
        looked = 0
        while (at := self.received.find(end, max(0, looked - len(end)))) < 0:
            looked = len(self.received)
            await self.receive()
        return self.take(at + len(end))

    async def read_exactly(self, count: int) -> bytes:
        while len(self.received) < count:
            await self.receive()
        return self.take(count)

    def take(self, count: int) -> bytes:
        data = bytes(memoryview(self.received)[:count])
        del self.received[:count]
        return data

    async def request(self) -> Request:
        """Return the next request, with its whole body."""
        head = (await self.read_until(b"\r\n\r\n")).decode("latin-1")
        method, target, _ = head.split("\r\n", 1)[0].split(" ", 2)
        pairs = (line.partition(":") for line in head.split("\r\n")[1:] if line)
        request = Request(method, target, {name.lower(): value.strip() for name, _, value in pairs})
        length = int(request.headers.get("content-length", 0))
        if request.headers.get("expect", "").lower() == "100-continue":
            await self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.headers.get("transfer-encoding", "").lower() == "chunked":
            request.body = await self.read_chunks()
        elif length:
            request.body = await self.read_exactly(length)
        if request.headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            request.body = without_chunks(request.body)
        return request

    async def read_chunks(self) -> bytes:
        chunks = []
        while size := int((await self.read_until(b"\r\n")).split(b";")[0], 16):
            chunks.append(await self.read_exactly(size))
            await self.read_until(b"\r\n")
        while await self.read_until(b"\r\n") != b"\r\n":
            pass
        return b"".join(chunks)

    async def until_closed(self, within_s: float) -> None:
        """Wait until the client closes the connection."""

        async def receive_all() -> None:
            while True:
                await self.receive()

        with contextlib.suppress(asyncio.TimeoutError, Disconnected):
            await asyncio.wait_for(receive_all(), within_s)

    # ------------------------------------------------------------------------------------------- sending

    async def turn(self, count: int) -> None:
        """Wait until a paced connection may send the next `count` bytes."""
        if self.bytes_per_s:
            now = self.loop.time()
            wait, self.next_turn = self.next_turn - now, max(self.next_turn, now) + count / self.bytes_per_s
            if wait > 0:
                await asyncio.sleep(wait)

    def burst(self) -> int:
        return (
            int(min(max(self.bytes_per_s * BURST_SECONDS, LEAST_BURST), MOST_BURST)) if self.bytes_per_s else MOST_BURST
        )

    async def send(self, data: bytes) -> None:
        try:
            await self.loop.sock_sendall(self.socket, data)
        except OSError as error:
            raise Disconnected from error

    async def send_pieces(self, pieces: list[Piece], sent: Callable[[int], None]) -> None:
        """Send pieces of the file; `sent` is called with each count of bytes."""
        for at, length in pieces:
            end = at + length
            while at < end:
                due = min(end - at, self.burst())
                await self.turn(due)
                await self.send_file(at, due, sent)
                at += due

    async def send_file(self, at: int, count: int, sent: Callable[[int], None]) -> None:
        end = at + count
        while at < end:
            try:
                done = os.sendfile(self.socket.fileno(), self.file, at, end - at)
                sent(done)
                at += done
            except BlockingIOError:
                await self.writable()
            except OSError as error:
                raise Disconnected from error

    async def writable(self) -> None:
        ready = self.loop.create_future()
        self.loop.add_writer(self.socket, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            self.loop.remove_writer(self.socket)

    async def reset(self) -> None:
        """Close with a RST, which also discards what is not sent yet."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.close()

    async def close(self) -> None:
        self.socket.close()


class SecureConnection(Connection):
    """A connection with TLS, by asyncio's streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, file: int, bytes_per_s: float):
        super().__init__(writer.get_extra_info("socket"), file, bytes_per_s)
        self.reader, self.writer = reader, writer

    async def receive(self) -> None:
        try:
            data = await self.reader.read(2**18)
        except OSError as error:
            raise Disconnected from error
        if not data:
            raise Disconnected
        self.received += data

    async def send(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError as error:
            raise Disconnected from error

    async def send_file(self, at: int, count: int, sent: Callable[[int], None]) -> None:
        await self.send(os.pread(self.file, count, at))
        sent(count)

    async def close(self) -> None:
        self.writer.transport.abort()


def without_chunks(body: bytes) -> bytes:
    """Return the bytes of an aws-chunked body, whose signatures are not checked."""
    chunks, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if not size:
            return b"".join(chunks)
        chunks.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def http_date(when: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(when))
