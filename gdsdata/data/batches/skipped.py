"""`Skipped` counts and names what ``on_error="skip"`` leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gdsdata.errors import CorruptData, IoError
from gdsdata.io.engine import warn_once

_MOST_NAMED = 100
# Ends the errors of files and objects that are not as they were indexed (csrc/base/file.cpp,
# csrc/backend/range_verdict.cpp).
_INDEX_ANEW = "iterate again to index it anew"

Read = TypeVar("Read")


class Skipped:
    """Counts the files and samples that are left out, and names the first 100.

    Attributes:
        has_changed_files: samples were left out because their file is not as it was indexed.
    """

    def __init__(self) -> None:
        self.has_changed_files = False
        self._files: Sequence[CorruptData] = ()
        self._samples = 0
        self._named: dict[tuple[str, int], str] = {}  # of samples; one that is met again each epoch once

    def leave_out_files(self, refusals: Sequence[CorruptData], files: int) -> None:
        """Note why some of the ``files`` are left out, when they are indexed.

        Replaces earlier notes of files.
        """
        self._files, self.has_changed_files = refusals, False
        if refusals:
            warn_once(
                f'{len(refusals)} of {files} files are left out (on_error="skip"; stats()["skipped"] names them), the '
                f"first because {refusals[0]}"
            )

    def leave_out_sample(self, error: CorruptData | IoError) -> None:
        """Note a sample that gave ``error``."""
        if not self._samples:
            warn_once(
                f'a sample is left out (on_error="skip"; stats()["skipped"] counts it and those to come): {error}'
            )
        self._samples += 1
        self.has_changed_files |= _INDEX_ANEW in str(error)
        if len(self._named) < _MOST_NAMED:
            self._named.setdefault((error.path, error.offset), str(error))

    def report(self) -> dict[str, Any]:
        """Return what `GDSDataset.stats` says of it."""
        files = [(error.path, error.offset, str(error)) for error in self._files[:_MOST_NAMED]]
        samples = [(path, offset, reason) for (path, offset), reason in self._named.items()]
        return {"files": len(self._files), "samples": self._samples, "named": [*files, *samples][:_MOST_NAMED]}

    def sound(self, samples: int, read: Callable[[int], Read]) -> list[Read]:
        """Read the samples of a bad batch one by one, and leave out those that fail.

        Args:
            samples: how many there are.
            read: reads a sample by its place in the batch, in order.

        Raises:
            NothingLeft: no sample is left. An empty batch would leave the other ranks waiting.
            StallError, FileNotFoundError: as ``read`` raises them: nothing is left out for these.
        """
        kept = []
        last_error: CorruptData | IoError | None = None
        for i in range(samples):
            try:
                kept.append(read(i))
            except (IoError, CorruptData) as error:
                self.leave_out_sample(error)
                last_error = error.with_traceback(None)  # its frames, this one too, would keep the data set
        if last_error is not None and not kept:
            raise NothingLeft.of(samples, last_error)
        return kept


class NothingLeft(CorruptData):
    """No sample of a batch is left.

    Attributes:
        last_error: of its last sample.
    """

    last_error: CorruptData | IoError

    @classmethod
    def of(cls, samples: int, error: CorruptData | IoError) -> NothingLeft:
        """Return the error for a batch of so many samples, which are all bad."""
        made = cls(
            f'on_error="skip": none of the {samples} samples of a batch is left, and a batch cannot be left out, for '
            f"other ranks would wait for it: mend the files, or use larger batches; the last sample because {error}",
            error.path,
            error.offset,
            error.length,
        )
        made.last_error = error
        return made
