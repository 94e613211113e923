"""Pages of a file that is being written which no single part of it fills."""

from __future__ import annotations

import threading

PAGE_BYTES = 4096


class PartialPages:
    """Puts pages together from parts that arrive one by one.

    No two parts may have a byte in common.

    Any thread may call it: one lock guards all of its state.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: dict[int, bytearray] = {}  # by page number; zeros where no part has arrived
        self._arrived: dict[int, int] = {}  # bytes that have arrived, by page number
        self._held: set[int] = set()
        self._whole: set[int] = set()  # pages that have arrived completely and are not held

    @property
    def whole_bytes(self) -> int:
        """How many bytes `take_whole` would return."""
        return len(self._whole) * PAGE_BYTES

    def hold(self, begin: int, end: int) -> None:
        """Keep the pages of a range of the file from `take_whole` until `release`.

        The caller writes them.
        """
        with self._lock:
            self._held.update(range(begin // PAGE_BYTES, end // PAGE_BYTES))

    def release(self, begin: int, end: int) -> None:
        """End `hold` for the same range."""
        with self._lock:
            numbers = range(begin // PAGE_BYTES, end // PAGE_BYTES)
            self._held.difference_update(numbers)
            self._whole.update(number for number in numbers if self._arrived.get(number) == PAGE_BYTES)

    def add(self, offset: int, content: bytes | memoryview) -> None:
        """Add a part.

        Args:
            offset: where it lies in the file, in bytes.
            content: its bytes, which are copied.
        """
        done = 0
        while done < len(content):
            number, begin = divmod(offset + done, PAGE_BYTES)
            part = content[done : done + PAGE_BYTES - begin]
            with self._lock:
                page = self._pages.setdefault(number, bytearray(PAGE_BYTES))
                page[begin : begin + len(part)] = part
                self._arrived[number] = self._arrived.get(number, 0) + len(part)
                if self._arrived[number] == PAGE_BYTES and number not in self._held:
                    self._whole.add(number)
            done += len(part)

    def take(self, begin: int, end: int) -> bytearray:
        """Return a range of pages, and forget those that are whole.

        Bytes that have not arrived are zeros.
        """
        found = bytearray(end - begin)
        for number in range(begin // PAGE_BYTES, end // PAGE_BYTES):
            with self._lock:
                page = self._pages.get(number, b"")
                at = number * PAGE_BYTES - begin
                found[at : at + len(page)] = page
                if self._arrived.get(number) == PAGE_BYTES:
                    del self._pages[number], self._arrived[number]
                    self._whole.discard(number)
        return found

    def take_whole(self) -> list[tuple[int, bytearray]]:
        """Return the pages that are whole and not held, and forget them.

        The result is that of `take_runs`.
        """
        with self._lock:
            numbers, self._whole = self._whole, set()
            for number in numbers:
                del self._arrived[number]
            return self._joined(numbers)

    def take_runs(self) -> list[tuple[int, bytearray]]:
        """Return all pages that are left, with adjacent ones joined, and forget them.

        Returns:
            The offset in the file and the bytes of each run.
        """
        with self._lock:
            return self._joined(set(self._pages))

    def _joined(self, numbers: set[int]) -> list[tuple[int, bytearray]]:
        """Remove these pages and join adjacent ones. The caller holds the lock."""
        found: list[tuple[int, bytearray]] = []
        for number in sorted(numbers):
            offset, page = number * PAGE_BYTES, self._pages.pop(number)
            if found and found[-1][0] + len(found[-1][1]) == offset:
                found[-1][1].extend(page)
            else:
                found.append((offset, page))
        return found
