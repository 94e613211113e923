"""`Transfers`: files of memory folders that ranks send to one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gdsdata.checkpoint.background.copies import Generation, Transfer
from gdsdata.checkpoint.background.memory_folder import MemoryCopy, MemoryFolder, mapped
from gdsdata.collective.peers import Parcel
from gdsdata.io import engine


class Transfers:
    """This rank's part in transfers of files between memory folders.

    Args:
        folder: of the copies.
        generation: whose files they are.
        transfers: of all ranks.
        rank: of this process.

    Attributes:
        errors: why transfers failed, by their number, as far as this rank knows.
    """

    def __init__(self, folder: MemoryFolder, generation: Generation, transfers: Sequence[Transfer], rank: int) -> None:
        self._folder, self._generation, self._transfers, self._rank = folder, generation, transfers, rank
        self._contents: dict[int, torch.Tensor] = {}  # of the files to send and to fill, by number
        self._coming: dict[int, MemoryCopy] = {}
        self.errors: dict[int, str] = {}

    def open(self) -> dict[int, str]:
        """Map the files that are sent, and begin those that come. Returns `errors`."""
        for number, one in enumerate(self._transfers):
            try:
                if one.source == self._rank:
                    self._contents[number] = self._mapped(one)
                elif one.destination == self._rank:
                    copy = self._coming[number] = self._folder.begin(self._generation, one.file, one.size_bytes)
                    copy.occupy()
                    self._contents[number] = copy.mapped()
            except (OSError, ValueError) as error:
                self.errors[number] = str(error)
        return self.errors

    def refuse(self, errors: Sequence[dict[int, str]]) -> None:
        """Leave out the transfers that a rank cannot make."""
        for number in {number for one in errors for number in one}:
            self._contents.pop(number, None)

    @property
    def sends(self) -> list[Parcel]:
        return [
            Parcel(one.destination, number, self._contents[number])
            for number, one in enumerate(self._transfers)
            if one.source == self._rank and number in self._contents
        ]

    @property
    def receives(self) -> list[Parcel]:
        return [
            Parcel(one.source, number, self._contents[number])
            for number, one in enumerate(self._transfers)
            if one.destination == self._rank and number in self._contents
        ]

    def checksums(self) -> dict[int, int]:
        """Return the CRC-32 of each file that this rank has sent."""
        return {number: _crc32_of(content) for _, number, content in self.sends}

    def complete(self, checksums: Sequence[dict[int, int]]) -> None:
        """Rename the files that came, if they have the checksums of those that were sent."""
        sent = {number: crc32 for one in checksums for number, crc32 in one.items()}
        for _, number, content in self.receives:
            try:
                if _crc32_of(content) != sent[number]:
                    raise OSError(f"'{self._coming[number].path}' arrived with another checksum than it was sent with")
                self._coming[number].complete()
            except OSError as error:
                self.errors[number] = str(error)

    def close(self) -> None:
        """Remove the files that are not complete."""
        self._contents.clear()
        for copy in self._coming.values():
            copy.abandon()

    def _mapped(self, one: Transfer) -> torch.Tensor:
        content = mapped(self._folder.file(self._generation, one.file))
        if content.nbytes != one.size_bytes:
            raise OSError(f"the copy has {content.nbytes} bytes instead of {one.size_bytes}")
        return content


def _crc32_of(content: torch.Tensor) -> int:
    return int(engine.crc32_of_parts(content, np.zeros(1, np.int64), np.array([content.nbytes]))[0])
