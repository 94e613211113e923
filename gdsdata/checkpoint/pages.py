"""Pages of a file in the making that no part of it fills by itself."""

from __future__ import annotations

import threading

PAGE_BYTES = 4096


class Pages:
    """They are put together from parts that come one by one, by any threads; no two parts have a byte in common."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: dict[int, bytearray] = {}  # by their numbers in the file; zeros where nothing has come
        self._come: dict[int, int] = {}  # how many bytes of each
        self._held: set[int] = set()
        self._whole: set[int] = set()  # of which all has come, and that are not held

    @property
    def whole_bytes(self) -> int:
        """Of pages that `take_whole` would give."""
        return len(self._whole) * PAGE_BYTES

    def hold(self, begin: int, end: int) -> None:
        """Until `release`, pages from one place in the file to another stay here: somebody else writes there."""
        with self._lock:
            self._held.update(range(begin // PAGE_BYTES, end // PAGE_BYTES))

    def release(self, begin: int, end: int) -> None:
        with self._lock:
            numbers = range(begin // PAGE_BYTES, end // PAGE_BYTES)
            self._held.difference_update(numbers)
            self._whole.update(number for number in numbers if self._come.get(number) == PAGE_BYTES)

    def add(self, offset: int, content: bytes | memoryview) -> None:
        done = 0
        while done < len(content):
            number, begin = divmod(offset + done, PAGE_BYTES)
            part = content[done : done + PAGE_BYTES - begin]
            with self._lock:
                page = self._pages.setdefault(number, bytearray(PAGE_BYTES))
                page[begin : begin + len(part)] = part
                self._come[number] = self._come.get(number, 0) + len(part)
                if self._come[number] == PAGE_BYTES and number not in self._held:
                    self._whole.add(number)
            done += len(part)

    def take(self, begin: int, end: int) -> bytearray:
        """What has come of whole pages, zeros for the rest. Those of which all has come are no longer remembered."""
        found = bytearray(end - begin)
        for number in range(begin // PAGE_BYTES, end // PAGE_BYTES):
            with self._lock:
                page = self._pages.get(number, b"")
                at = number * PAGE_BYTES - begin
                found[at : at + len(page)] = page
                if self._come.get(number) == PAGE_BYTES:
                    del self._pages[number], self._come[number]
                    self._whole.discard(number)
        return found

    def take_whole(self) -> list[tuple[int, bytearray]]:
        """As `take_runs`, those of which all has come, but for those that are held. They are no longer remembered."""
        with self._lock:
            numbers, self._whole = self._whole, set()
            for number in numbers:
                del self._come[number]
            return self._joined(numbers)

    def take_runs(self) -> list[tuple[int, bytearray]]:
        """All that are left, those that follow one another together: where they begin in the file, and their bytes."""
        with self._lock:
            return self._joined(set(self._pages))

    def _joined(self, numbers: set[int]) -> list[tuple[int, bytearray]]:
        """With the lock."""
        found: list[tuple[int, bytearray]] = []
        for number in sorted(numbers):
            offset, page = number * PAGE_BYTES, self._pages.pop(number)
            if found and found[-1][0] + len(found[-1][1]) == offset:
                found[-1][1].extend(page)
            else:
                found.append((offset, page))
        return found
