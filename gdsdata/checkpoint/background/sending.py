"""Files on their way to a store, with bounded memory and at a bounded pace."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TYPE_CHECKING

from gdsdata.checkpoint.threads import DaemonThreads, results_of
from gdsdata.checkpoint.urls import store_and_key
from gdsdata.errors import CorruptData

if TYPE_CHECKING:
    from gdsdata.storage.store import Store, Upload

PARTS_AT_A_TIME = 4  # each in memory
_PUT_BYTES = 8 << 20  # a smaller file is one request
_NICENESS = 10  # of threads that upload: training comes first


class Stopped(Exception):
    """The program ends before a file was sent. The next one sends it again."""


def lower_priority() -> None:
    """Give this thread a low priority."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Pace:
    """Spreads bytes over time. Any thread may call it.

    Args:
        bytes_per_s: the most of them in a second; None: as many as there are.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()  # guards _next_s
        self._next_s = 0.0  # when the bytes before are due to have been sent
        self._stopped = threading.Event()

    def wait(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent.

        Raises:
            Stopped: `stop` was called.
        """
        delay_s = 0.0
        if self._bytes_per_s is not None:
            with self._lock:
                now = time.monotonic()
                begin_s = max(self._next_s, now)
                self._next_s = begin_s + size_bytes / self._bytes_per_s
                delay_s = begin_s - now
        self.sleep(delay_s)

    def sleep(self, seconds: float) -> None:
        """Wait. Raises as `wait` does."""
        if self._stopped.wait(seconds):
            raise Stopped("the program ends before its checkpoints are uploaded")

    def stop(self) -> None:
        """Have `wait` raise from now on."""
        self._stopped.set()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()


class Sender:
    """Sends files, one at a time. It owns the threads that send parts.

    Memory: `PARTS_AT_A_TIME` parts. The bytes of a file do not stay in the page cache.

    Args:
        pace: of the bytes.
        on_sent: called with the size of each part that was sent, by several threads.
    """

    def __init__(self, pace: Pace, on_sent: Callable[[int], object]) -> None:
        self._pace, self._on_sent = pace, on_sent
        self._threads: DaemonThreads | None = None

    def send(self, path: str, size_bytes: int, url: str) -> None:
        """Send a file. The object appears when it is complete.

        Args:
            path: of the file.
            size_bytes: its size.
            url: of the object.

        Raises:
            FileNotFoundError: there is no such file, or no such bucket.
            CorruptData: the file has another size.
            PermissionError, IoError: the store refuses it.
            Stopped: the program ends.
        """
        store, key = store_and_key(url)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor).st_size
            if found != size_bytes:
                raise CorruptData(f"'{path}' has {found} bytes, and its manifest says {size_bytes}", path, 0, found)
            self._send(descriptor, path, size_bytes, store, key)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.close()

    def _send(self, descriptor: int, path: str, size_bytes: int, store: Store, key: str) -> None:
        if size_bytes <= _PUT_BYTES:
            content = memoryview(bytearray(size_bytes))
            _read(descriptor, path, content, 0)
            self._pace.wait(size_bytes)
            store.put(key, content)
            self._on_sent(size_bytes)
            return
        upload = store.upload(key, size_bytes)
        try:
            self._send_parts(descriptor, path, size_bytes, upload)
            upload.complete()
        except BaseException:
            upload.abort()
            raise

    def _send_parts(self, descriptor: int, path: str, size_bytes: int, upload: Upload) -> None:
        part_bytes = upload.part_bytes
        numbers = iter(range(-(-size_bytes // part_bytes)))
        taking = threading.Lock()  # guards numbers
        failed = threading.Event()

        def send_some() -> None:
            lower_priority()
            memory = memoryview(bytearray(part_bytes))
            while not failed.is_set():
                with taking:
                    number = next(numbers, None)
                if number is None:
                    return
                begin = number * part_bytes
                body = memory[: min(part_bytes, size_bytes - begin)]
                try:
                    self._pace.wait(len(body))
                    _read(descriptor, path, body, begin)
                    upload.send(number, body)
                except BaseException:
                    failed.set()
                    raise
                self._on_sent(len(body))

        if self._threads is None:
            self._threads = DaemonThreads(PARTS_AT_A_TIME, "gdsdata-upload")
        sends = [self._threads.submit(send_some) for _ in range(PARTS_AT_A_TIME)]
        wait(sends)
        for _ in results_of(sends):
            pass


def _read(descriptor: int, path: str, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            message = f"'{path}' was cut to {offset + done} bytes while it was uploaded"
            raise CorruptData(message, path, offset + done, len(memory) - done)
        done += count
    os.posix_fadvise(descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)
