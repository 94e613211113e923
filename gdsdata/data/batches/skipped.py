"""What ``on_error="skip"`` leaves out: found, counted, named."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import recognise
from gdsdata.formats.index import Format, Index
from gdsdata.formats.parsers.magics import SHARDS_INDEX
from gdsdata.io.engine import warn_once

if TYPE_CHECKING:
    from gdsdata.formats.fields import FieldIndex
    from gdsdata.formats.megatron import WindowIndex

_MOST_NAMED = 100
# Files that are asked for their format where the first ones do not tell it.
_MOST_ASKED = 100


class Skipped:
    """Files and samples that a data set leaves out; counts are exact, and the first 100 are named."""

    def __init__(self) -> None:
        self._files: Sequence[CorruptData] = ()
        self._samples = 0
        self._named: dict[tuple[str, int], str] = {}  # of samples; one that is met again each epoch once

    def leave_out_files(self, refusals: Sequence[CorruptData], files: int) -> None:
        """These, of so many ``files``; those of an index before are forgotten."""
        self._files = refusals
        if refusals:
            warn_once(
                f'{len(refusals)} of {files} files are left out (on_error="skip"; stats()["skipped"] names them), the '
                f"first because {refusals[0]}"
            )

    def leave_out_sample(self, error: CorruptData | IoError) -> None:
        """Of which ``error`` came."""
        if not self._samples:
            warn_once(
                f'a sample is left out (on_error="skip"; stats()["skipped"] counts it and those to come): {error}'
            )
        self._samples += 1
        if len(self._named) < _MOST_NAMED:
            self._named.setdefault((error.path, error.offset), str(error))

    def report(self) -> dict[str, Any]:
        """As `GDSDataset.stats` has it."""
        files = [(error.path, error.offset, str(error)) for error in self._files[:_MOST_NAMED]]
        samples = [(path, offset, reason) for (path, offset), reason in self._named.items()]
        return {"files": len(self._files), "samples": self._samples, "named": [*files, *samples][:_MOST_NAMED]}


def nothing_left(samples: int, error: CorruptData | IoError) -> CorruptData:
    """Why a batch of so many bad ``samples`` is an error all the same."""
    return CorruptData(
        f'on_error="skip": none of the {samples} samples of a batch is left, and a batch cannot be left out, for other '
        f"ranks would wait for it: mend the files, or use larger batches; the last sample because {error}",
        error.path,
        error.offset,
        error.length,
    )


def first_recognised(paths: Sequence[str]) -> Format:
    """`recognise`, by the next files where the first ones are damaged.

    Raises:
        ValueError, FileNotFoundError, IoError: as `recognise` does of all of them.
    """
    try:
        return recognise(paths)
    except ValueError as error:
        for path in paths[:_MOST_ASKED]:
            try:
                return recognise([path])
            except ValueError:
                continue
        raise error


def index_sound(format: Format, paths: list[str]) -> tuple[Index | FieldIndex | WindowIndex, list[CorruptData]]:
    """The index of the files of ``paths`` that ``format`` does not refuse as damaged, and why it refuses the others.

    Where one is damaged each is indexed by itself, too: some three times the work, however many are.

    Raises:
        CorruptData: all are.
        ValueError, FileNotFoundError, IoError: as the format raises them: such files are not left out.
    """
    if hasattr(format, "without"):
        return _index_sound_shards(format, paths)
    try:
        return format.index(paths), []
    except CorruptData:
        refusals: dict[str, CorruptData] = {}
        sound = []
        for path in format.data_files(paths) if hasattr(format, "data_files") else paths:
            try:
                format.index([path])
            except CorruptData as refusal:
                # A pair of files is one, whichever names it.
                refusals.setdefault(refusal.path or path, _to_keep(refusal))
                continue
            except ValueError:
                pass  # sound, but by itself no data set
            sound.append(path)
        if not sound:
            raise _all_refused(list(refusals.values())) from None
        return format.index(sound), list(refusals.values())


def _index_sound_shards(format: Any, paths: list[str]) -> tuple[FieldIndex, list[CorruptData]]:
    """Of a format whose index.json lists the files: each that is damaged is found by an index of its own."""
    refusals: list[CorruptData] = []
    while True:
        left_out = tuple(refusal.path for refusal in refusals)
        try:
            return replace(format, without=(*format.without, *left_out)).index(paths), refusals
        except CorruptData as refusal:
            if refusal.path in ("", *left_out) or os.path.basename(refusal.path) == SHARDS_INDEX:
                raise
            refusals.append(_to_keep(refusal))
        except ValueError:
            if refusals:
                raise _all_refused(refusals) from None
            raise


def _to_keep(error: CorruptData) -> CorruptData:
    """Without its traceback, whose frames would keep all that its callers have."""
    return CorruptData(str(error), error.path, error.offset, error.length)


def _all_refused(refusals: list[CorruptData]) -> CorruptData:
    first = refusals[0]
    message = f'on_error="skip": all of the {len(refusals)} files are damaged, the first because {first}'
    return CorruptData(message, first.path, first.offset, first.length)
