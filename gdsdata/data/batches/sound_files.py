"""``on_error="skip"`` for files: an index without those that are damaged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from gdsdata.errors import CorruptData
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.parsers.magics import SHARDS_INDEX
from gdsdata.formats.registry import recognise

# So many files are asked for their format if the first ones do not show it.
_MOST_ASKED = 100


@runtime_checkable
class ShardFormat(Protocol):
    """A format whose index.json lists its files, as a dataclass.

    Attributes:
        without: paths of files that are left out.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    without: tuple[str, ...]

    def index(self, paths: list[str]) -> SampleIndex: ...


@runtime_checkable
class FileLister(Protocol):
    """A format that has more files than those with samples."""

    def data_files(self, paths: list[str]) -> list[str]:
        """Return the files of ``paths`` that have samples."""


def first_recognised(paths: Sequence[str]) -> Format:
    """Recognize the format, by the next files if the first ones are damaged.

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
    """Return the index of the files that ``format`` accepts, and why not the others.

    If one is damaged, each is indexed by itself too. That is some three times the work, however
    many are damaged.

    Raises:
        CorruptData: all are.
        ValueError, FileNotFoundError, IoError: as the format raises them: such files are not left
            out.
    """
    if isinstance(format, ShardFormat):
        return _index_sound_shards(format, paths)
    try:
        return format.index(paths), []
    except CorruptData:
        refusals: dict[str, CorruptData] = {}
        sound = []
        for path in format.data_files(paths) if isinstance(format, FileLister) else paths:
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


def _index_sound_shards(format: ShardFormat, paths: list[str]) -> tuple[SampleIndex, list[CorruptData]]:
    """Do the same for files in an index.json: one more index for each damaged file."""
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
    """Return a copy without traceback, whose frames would keep callers' objects."""
    return CorruptData(str(error), error.path, error.offset, error.length)


def _all_refused(refusals: list[CorruptData]) -> CorruptData:
    first = refusals[0]
    message = f'on_error="skip": all of the {len(refusals)} files are damaged, the first because {first}'
    return CorruptData(message, first.path, first.offset, first.length)
