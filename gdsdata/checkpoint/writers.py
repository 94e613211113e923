"""The writer of a checkpoint: `FileWriter` for a path, `ObjectWriter` for a URL."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from gdsdata.checkpoint.file_writer import Extent, FileWriter
from gdsdata.checkpoint.urls import is_url
from gdsdata.io.options import EngineOptions

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


class Writer(Protocol):
    """Writes what appears under its name when it is complete. See `FileWriter` for each method."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def write_in_batches(
        self, extents: Iterable[Extent], places: Sequence[tuple[int, int]] | None = None
    ) -> Generator[int, None, None]: ...

    def write_bytes(self, parts: Iterable[tuple[int, bytes]]) -> None: ...

    def commit(self) -> None: ...


def writer_of(path: str, size_bytes: int, options: EngineOptions) -> Writer:
    """Return the writer of a path or URL.

    Args:
        path: of a file, or the URL of an object.
        size_bytes: the size that it will have.
        options: of the engine.

    Raises:
        IoError: the file cannot be created, the disk is full, or the store refuses the upload.
    """
    if not is_url(path):
        return FileWriter(path, size_bytes, options)
    from gdsdata.checkpoint.object_writer import ObjectWriter  # late: most programs write files

    return ObjectWriter(path, size_bytes)
