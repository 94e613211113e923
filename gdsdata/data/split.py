"""``split=``: a split by its name, and a contiguous part of samples, in the files' order."""

from __future__ import annotations

import math
import re
from numbers import Real
from typing import Any

from gdsdata.formats.index import SampleIndex
from gdsdata.whole_numbers import shown

# Compiled when first used, which few programs do.
_SLICE = r"(?s)(.+)\[(.*)\]"
_PERCENT = r"(?:(\d{1,3})%)?:(?:(\d{1,3})%)?"


class Split:
    """A part of a data set.

    Args:
        name: of the split whose files are meant; None: all files of the source.
        begin, end: of the part of their samples, as fractions of their number.
    """

    def __init__(self, name: str | None = None, begin: float = 0.0, end: float = 1.0) -> None:
        self.name, self.begin, self.end = name, begin, end


def checked_split(split: Any) -> Split:
    """Return the ``split=`` of a data set.

    Raises:
        TypeError, ValueError: it is no name, no pair of numbers that rise within 0 and 1, and no
            name with such a pair.
    """
    name, bounds = None, split
    if isinstance(split, str):
        name, bounds = split, (0.0, 1.0)
    elif isinstance(split, (tuple, list)) and len(split) == 3 and isinstance(split[0], str):
        name, *bounds = split
    is_pair = isinstance(bounds, (tuple, list)) and all(isinstance(one, Real) for one in bounds)
    if not is_pair or len(bounds) != 2:
        raise TypeError(
            f"split={shown(split)} must be two numbers, where the part begins and ends: (0, 0.9); the name of a split: "
            f"'train'; or both: ('train', 0, 0.9)"
        )
    if not (0 <= bounds[0] < bounds[1] <= 1):  # a NaN is refused too
        raise ValueError(f"split={tuple(split)}: the part begins and ends within 0 and 1, as in (0, 0.9) and (0.9, 1)")
    if name is not None:
        _check_name(name)
    return Split(name, float(bounds[0]), float(bounds[1]))


def _check_name(name: str) -> None:
    if not name:
        raise ValueError("split='' is no name of a split: pass one, as in 'train', or leave split= out")
    if match := re.fullmatch(_SLICE, name):
        percent = re.fullmatch(_PERCENT, match[2])
        begin, end = (int(percent[1] or 0) / 100, int(percent[2] or 100) / 100) if percent else (0, 0.9)
        raise ValueError(
            f"split={shown(name)} is a slice, as `datasets` writes it: write the part as fractions behind the name, as "
            f"in split=({match[1]!r}, {begin:g}, {end:g})"
        )


def part_of(index: SampleIndex, split: Split, source: str) -> SampleIndex:
    """Return the part of an index that a split has.

    Sample i of N belongs to it if ``round(begin * N) <= i < round(end * N)``. A half is
    rounded up. So parts that meet have no sample in common and leave none out.

    Raises:
        ValueError: it has no samples.
    """
    bounds = (split.begin, split.end)
    if bounds == (0.0, 1.0):
        return index
    samples = len(index)
    begin, end = (math.floor(bound * samples + 0.5) for bound in bounds)
    if begin == end:
        said = bounds if split.name is None else (split.name, *bounds)
        raise ValueError(f"split={said}: of the {samples} samples of {source} it has none: use a larger part")
    return index.part(begin, end)
