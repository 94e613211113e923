"""`StretchReader`: reads short stretches of a file, such as heads of samples."""

from __future__ import annotations

import numpy as np

from gdsdata.storage.opened import Opened, open_file


class StretchReader:
    """Reads short stretches of one file, which is opened for the first of them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: Opened | None = None

    def __enter__(self) -> StretchReader:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file is not None:
            self._file.__exit__(*raised)

    def read(self, offsets: np.ndarray, count: int) -> np.ndarray:
        """Return ``count`` bytes from each offset (int64 (n,)) on: uint8 (n, count).

        Behind the file's end they are zeros.

        Raises:
            FileNotFoundError: there is no such file.
            IoError: any other refusal.
        """
        if not len(offsets):
            return np.empty((0, count), np.uint8)
        if self._file is None:
            self._file = open_file(self._path, at_random=True)
        return self._file.read_each(offsets, count)
