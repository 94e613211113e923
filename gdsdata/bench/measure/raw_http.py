"""Plain GETs and PUTs by raw sockets: as many as a server answers, without any client's work.

GETs: one thread, epoll, and one buffer into which everything is received. PUTs: a thread for each
connection. Responses are checked for status and length, not for their bytes.
"""

import contextlib
import itertools
import re
import select
import socket
import ssl
import statistics
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BUFFER_BYTES = 2**20
ROUND_TRIPS = 101
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class RawConnection:
    """One connection and the response that it receives."""

    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        self.secure = parts.scheme == "https"
        self.socket: Any = socket.create_connection((parts.hostname, parts.port or (443 if self.secure else 80)), 10)
        if self.secure:
            self.socket = ssl.create_default_context().wrap_socket(self.socket, server_hostname=parts.hostname)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.head, self.left = b"", None  # bytes of the body to come; None: its head comes first

    def ask(self, request, body=b""):
        self.head, self.left = b"", None
        self.socket.sendall(request)
        self.socket.sendall(body)

    def wait(self, buffer):
        """Receive a response to its end."""
        complete = False
        while not complete:
            _, complete = self.take(buffer)

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


def request_of(url, header, method="GET"):
    parts = urllib.parse.urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    return f"{method} {target} HTTP/1.1\r\nHost: {parts.netloc}\r\n{header}\r\n\r\n".encode()


def range_of(offset, length):
    return f"Range: bytes={offset}-{offset + length - 1}"


def round_trip_s(url):
    """Return the median time of a range GET of one byte, on a connection that is open."""
    one, request = RawConnection(url), request_of(url, range_of(0, 1))
    buffer, found = memoryview(bytearray(BUFFER_BYTES)), []
    with contextlib.closing(one.socket):
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            one.ask(request)
            one.wait(buffer)
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def raw_puts(urls, size_bytes, seconds):
    """Put objects of `size_bytes` again and again, by a connection and a thread for each URL.

    Args:
        urls: signed for PUT if the server wants it.

    Returns:
        The same as `raw_ranges`.
    """
    body, started = memoryview(bytearray(size_bytes)), time.perf_counter()

    def work(url):
        one, request = RawConnection(url), request_of(url, f"Content-Length: {size_bytes}", "PUT")
        buffer, used, done = memoryview(bytearray(BUFFER_BYTES)), time.thread_time(), 0
        with contextlib.closing(one.socket):
            while time.perf_counter() - started < seconds or not done:
                one.ask(request, body)
                one.wait(buffer)
                done += 1
        return done, time.thread_time() - used

    with ThreadPoolExecutor(len(urls)) as threads:
        done, cpu = map(sum, zip(*threads.map(work, urls), strict=True))
    return rates(done * size_bytes, done, time.perf_counter() - started, cpu, len(urls))


def rates(moved, done, elapsed, cpu, connections):
    return {
        "gb_per_s": moved / elapsed / 1e9,
        "cpu_s_per_gb": cpu / moved * 1e9,
        "requests_per_s": done / elapsed,
        "connections": connections,
    }


def raw_ranges(urls, pieces, connections, seconds):
    """Fetch pieces again and again.

    Args:
        urls: {key: URL}, signed if the server wants it; all of one host.

    Returns:
        {"gb_per_s", "cpu_s_per_gb", "requests_per_s", "connections"}: what arrived in `seconds`.
        CPU time is that of this thread.
    """
    requests = itertools.cycle([request_of(urls[key], range_of(offset, length)) for key, offset, length in pieces])
    buffer = memoryview(bytearray(BUFFER_BYTES))
    moved = done = 0
    with contextlib.ExitStack() as opened:
        poll = opened.enter_context(contextlib.closing(select.epoll()))
        by_number = {}
        for _ in range(connections):
            one = RawConnection(next(iter(urls.values())))
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
                while one.secure and not complete and one.socket.pending():
                    more, complete = one.take(buffer)
                    count += more
                moved += count
                if complete:
                    done += 1
                    one.ask(next(requests))
        cpu = time.thread_time() - used
    return rates(moved, done, elapsed, cpu, connections)
