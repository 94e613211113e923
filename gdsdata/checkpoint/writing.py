"""From tensors into one file, that is there whole when all is done and not at all before."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from gdsdata import engine
from gdsdata.options import EngineOptions

PAGE_BYTES = 4096  # what begins at a multiple of it is written from where it lies

Extent = tuple[int, torch.Tensor]  # where it goes in the file, and its bytes: uint8, one dimension, contiguous


class Writing:
    """A file in the making; see csrc/engine/whole.h. Used by ``with``: it leaves nothing where it was not committed.

    Args:
        path: its name, under which is what was there before until `commit`.
        size_bytes: that it will have.
        options: of the engine.

    Raises:
        IoError: it cannot be made, or the disk has not so much space.
    """

    def __init__(self, path: str, size_bytes: int, options: EngineOptions) -> None:
        self._output: engine.Output | None = engine.Output(path, size_bytes)
        self._options = options

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._output = None  # now, and not when an error's traceback goes

    def write(self, extents: Sequence[Extent], with_checksums: bool = False) -> list[int]:
        """Each extent, and with checksums the CRC-32 of each. On a GPU it comes behind the current stream's work."""
        checksums = [0] * len(extents)
        for device in dict.fromkeys(tensor.device for _, tensor in extents):
            places = [i for i, (_, tensor) in enumerate(extents) if tensor.device == device]
            shared = engine.shared_engine(self._options, device)
            found = self._output.write(
                shared,
                np.array([extents[i][0] for i in places], np.int64),
                np.array([extents[i][1].nbytes for i in places], np.int64),
                np.array([extents[i][1].data_ptr() for i in places], np.uint64),
                with_checksums,
                shared.mark(engine.stream_of(device)),
                True,
            )
            for i, checksum in zip(places, found.tolist(), strict=False):
                checksums[i] = checksum
        return checksums

    def write_bytes(self, parts: Iterable[tuple[int, bytes]]) -> None:
        """Small parts and where they go in the file; those that follow one another are written as one."""
        runs: list[tuple[int, bytearray]] = []
        for offset, content in sorted(parts, key=operator.itemgetter(0)):
            if runs and runs[-1][0] + len(runs[-1][1]) == offset:
                runs[-1][1].extend(content)
            else:
                runs.append((offset, bytearray(content)))
        self.write([(offset, torch.frombuffer(run, dtype=torch.uint8)) for offset, run in runs if run])

    def commit(self) -> None:
        """Puts it on storage, and then under its name."""
        self._output.commit()


def reached(flat: torch.Tensor) -> torch.Tensor:
    """On a device that the engine works on: torch brings what is elsewhere to the CPU."""
    return flat if engine.reaches(flat.device) else flat.cpu()


def make_folder(path: str) -> None:
    """The folder and those above it, on storage."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(os.path.abspath(path))
    make_folder(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(above)


def sync_folder(path: str) -> None:
    """The names in it are on storage when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
