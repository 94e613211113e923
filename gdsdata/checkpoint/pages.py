"""Pages of a file in the making that no part of it fills by itself."""

from __future__ import annotations

import threading

PAGE_BYTES = 4096


class Pages:
    """They are put together from parts, none of which comes twice, by any threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: dict[int, bytearray] = {}  # by their numbers in the file; zeros where nothing has come
        self._lacking_bytes: dict[int, int] = {}
        self._whole: list[int] = []
        self._taken: set[int] = set()

    def add(self, offset: int, content: bytes) -> None:
        with self._lock:
            done = 0
            while done < len(content):
                number, begin = divmod(offset + done, PAGE_BYTES)
                part = content[done : done + PAGE_BYTES - begin]
                if number in self._taken:
                    raise RuntimeError(f"a part of page {number} comes after the page was taken")
                if number not in self._pages:
                    self._pages[number], self._lacking_bytes[number] = bytearray(PAGE_BYTES), PAGE_BYTES
                self._pages[number][begin : begin + len(part)] = part
                self._lacking_bytes[number] -= len(part)
                if not self._lacking_bytes[number]:
                    self._whole.append(number)
                done += len(part)

    def take_whole(self) -> dict[int, bytearray]:
        """Those of which all bytes have come, and that were not taken before."""
        with self._lock:
            whole, self._whole = self._whole, []
            return self._take(whole)

    def take(self) -> dict[int, bytearray]:
        """All that were not taken before. Nothing may be added to them after that."""
        with self._lock:
            self._whole = []
            return self._take(list(self._pages))

    def _take(self, numbers: list[int]) -> dict[int, bytearray]:
        self._taken.update(numbers)
        for number in numbers:
            del self._lacking_bytes[number]
        return {number: self._pages.pop(number) for number in numbers}
