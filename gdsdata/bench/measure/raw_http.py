"""Plain range GETs by raw sockets: as many as a server answers, without any client's work.

One thread, epoll, and one buffer into which everything is received. Responses are checked for
status and length, not for their bytes.
"""

import contextlib
import itertools
import re
import select
import socket
import ssl
import time
import urllib.parse
from typing import Any

BUFFER_BYTES = 2**20
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class RawConnection:
    """One connection and the response that it receives."""

    def __init__(self, host, port, secure):
        self.socket: Any = socket.create_connection((host, port), 10)
        if secure:
            self.socket = ssl.create_default_context().wrap_socket(self.socket, server_hostname=host)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.head, self.left = b"", None  # bytes of the body to come; None: its head comes first

    def ask(self, request):
        self.head, self.left = b"", None
        self.socket.sendall(request)

    def take(self, buffer):
        """Receive once, and return (bytes of the body, whether it is complete)."""
        count = self.socket.recv_into(buffer)
        if not count:
            raise OSError("the server closed a connection")
        if self.left is not None:
            self.left -= count
            return count, self.left == 0
        self.head += bytes(buffer[:count])
        end = self.head.find(b"\r\n\r\n")
        if end < 0:
            return 0, False
        head, body = self.head[:end], len(self.head) - end - 4
        if head.split(b" ", 2)[1] not in (b"206", b"200"):
            raise OSError(f"the server answered {head[:200].decode('latin-1')}")
        length = LENGTH.search(head)
        if length is None:
            raise OSError("the server sent no Content-Length")
        self.left = int(length[1]) - body
        return body, self.left == 0


def request_of(url, piece):
    parts = urllib.parse.urlsplit(url)
    last = piece.offset + piece.length - 1
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    return f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nRange: bytes={piece.offset}-{last}\r\n\r\n".encode()


def raw_ranges(urls, pieces, connections, seconds):
    """Fetch pieces again and again.

    Args:
        urls: {key: URL}, signed if the server wants it; all of one host.

    Returns:
        {"gb_per_s", "cpu_s_per_gb", "requests_per_s", "connections"}: what arrived in `seconds`.
        CPU time is that of this thread.
    """
    parts = urllib.parse.urlsplit(next(iter(urls.values())))
    secure = parts.scheme == "https"
    address = parts.hostname, parts.port or (443 if secure else 80)
    requests = itertools.cycle([request_of(urls[piece.key], piece) for piece in pieces])
    buffer = memoryview(bytearray(BUFFER_BYTES))
    moved = done = 0
    with contextlib.ExitStack() as opened:
        poll = opened.enter_context(contextlib.closing(select.epoll()))
        by_number = {}
        for _ in range(connections):
            one = RawConnection(*address, secure)
            opened.callback(one.socket.close)
            by_number[one.socket.fileno()] = one
            poll.register(one.socket, select.EPOLLIN)
        started, used = time.perf_counter(), time.thread_time()
        for one in by_number.values():
            one.ask(next(requests))
        while (elapsed := time.perf_counter() - started) < seconds or not done:
            for number, _ in poll.poll(10):
                one = by_number[number]
                count, complete = one.take(buffer)
                while secure and not complete and one.socket.pending():
                    more, complete = one.take(buffer)
                    count += more
                moved += count
                if complete:
                    done += 1
                    one.ask(next(requests))
        cpu = time.thread_time() - used
    return {
        "gb_per_s": moved / elapsed / 1e9,
        "cpu_s_per_gb": cpu / moved * 1e9,
        "requests_per_s": done / elapsed,
        "connections": connections,
    }
