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

    def add(self, offset: int, content: bytes) -> None:
        done = 0
        while done < len(content):
            number, begin = divmod(offset + done, PAGE_BYTES)
            part = content[done : done + PAGE_BYTES - begin]
            with self._lock:
                page = self._pages.setdefault(number, bytearray(PAGE_BYTES))
                page[begin : begin + len(part)] = part
                self._come[number] = self._come.get(number, 0) + len(part)
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
        return found

    def take_runs(self) -> list[tuple[int, bytearray]]:
        """All that are left, those that follow one another together: where they begin in the file, and their bytes."""
        found: list[tuple[int, bytearray]] = []
        for number in sorted(self._pages):
            offset, page = number * PAGE_BYTES, self._pages.pop(number)
            if found and found[-1][0] + len(found[-1][1]) == offset:
                found[-1][1].extend(page)
            else:
                found.append((offset, page))
        return found
