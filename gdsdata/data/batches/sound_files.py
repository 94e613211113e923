"""``on_error="skip"``, of files: those that their format refuses as damaged are left out of the index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gdsdata.errors import CorruptData
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.parsers.magics import SHARDS_INDEX
from gdsdata.formats.registry import recognise

# So many files are asked for their format if the first ones do not tell it.
_MOST_ASKED = 100


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


def index_sound(format: Format, paths: list[str]) -> tuple[SampleIndex, list[CorruptData]]:
    """The index of the files of ``paths`` that ``format`` does not refuse as damaged, and why it refuses the others.

    Where one is damaged each is indexed by itself, too: some three times the work, however many
    are.

    Raises:
        CorruptData: all are.
        ValueError, FileNotFoundError, IoError: as the format raises them: such files are not left
            out.
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


def _index_sound_shards(format: Any, paths: list[str]) -> tuple[SampleIndex, list[CorruptData]]:
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
