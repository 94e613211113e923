"""``split=``: a contiguous part of a data set's samples, in the files' order."""

from __future__ import annotations

import math
from typing import Any

from gdsdata.data.arguments import shown
from gdsdata.formats.index import SampleIndex


def checked_split(split: Any) -> tuple[float, float]:
    """Return the ``split=`` of a data set, as floats.

    Raises:
        TypeError, ValueError: it is no pair of numbers that rise within 0 and 1.
    """
    is_list = isinstance(split, (tuple, list)) and all(isinstance(one, (int, float)) for one in split)
    if not is_list or len(split) != 2:
        named = ". For a split by name, give its folder or its files as the source" if isinstance(split, str) else ""
        raise TypeError(f"split={shown(split)} must be two numbers, where the part begins and ends: (0, 0.9){named}")
    if not (0 <= split[0] < split[1] <= 1):  # a NaN is refused too
        raise ValueError(f"split={tuple(split)}: the part begins and ends within 0 and 1, as in (0, 0.9) and (0.9, 1)")
    return float(split[0]), float(split[1])


def part_of(index: SampleIndex, split: tuple[float, float], source: str) -> SampleIndex:
    """Return the part of an index that a split has.

    Sample i of N belongs to it if ``round(begin * N) <= i < round(end * N)``. A half is
    rounded up. So parts that meet have no sample in common and leave none out.

    Raises:
        ValueError: it has no samples.
    """
    if split == (0.0, 1.0):
        return index
    samples = len(index)
    begin, end = (math.floor(bound * samples + 0.5) for bound in split)
    if begin == end:
        raise ValueError(f"split={split}: of the {samples} samples of {source} it has none: use a larger part")
    return index.part(begin, end)
