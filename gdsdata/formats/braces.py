"""``{0000..0003}`` and ``{a,b}`` in sources, as shells and WebDataset expand them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator

from gdsdata.storage.urls import is_remote

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])")
# Names that one source may mean: a digit too many must not become memory.
_MOST_NAMES = 10**6


def expanded(source: str) -> list[str]:
    """Return the names that a source means: itself, if it has no braces or is a file with them.

    The braces of a folder that exists are its own.

    Raises:
        ValueError: they are more than a million.
    """
    if "{" not in source or (not is_remote(source) and os.path.lexists(source)):
        return [source]
    literal = 0 if is_remote(source) else _literal_length(source)
    names = list(itertools.islice(_names_of(source[literal:]), _MOST_NAMES + 1))
    if len(names) > _MOST_NAMES:
        raise ValueError(f"{source} means more than {_MOST_NAMES} names: use a glob, or shorter ranges")
    return list(dict.fromkeys(source[:literal] + name for name in names))


def _literal_length(source: str) -> int:
    """Return the length of the longest folder with braces that exists; 0: there is none."""
    ends = [at for at, letter in enumerate(source) if letter == "/" and "{" in source[:at]]
    return next((end + 1 for end in reversed(ends) if os.path.lexists(source[:end])), 0)


def _names_of(source: str) -> Iterator[str]:
    begin = source.find("{")
    if begin < 0:
        yield source
        return
    pieces, end = _pieces(source, begin)
    before, content, after = source[:begin], source[begin + 1 : end], source[end + 1 :]
    if not pieces:  # it is never closed
        yield from (f"{before}{{{rest}" for rest in _names_of(source[begin + 1 :]))
        return
    parts: Iterator[str]
    if len(pieces) > 1:
        parts = itertools.chain.from_iterable(map(_names_of, pieces))
    else:
        parts = _range_of(content) or (f"{{{inner}}}" for inner in _names_of(content))
    endings = list(itertools.islice(_names_of(after), _MOST_NAMES + 1))
    yield from (f"{before}{part}{ending}" for part in parts for ending in endings)


def _pieces(source: str, begin: int) -> tuple[list[str], int]:
    """Return what commas separate in the braces that open at a place, and where these close."""
    pieces, depth, start = [], 0, begin + 1
    for at in range(begin, len(source)):
        depth += {"{": 1, "}": -1}.get(source[at], 0)
        if depth == 0 or (depth == 1 and source[at] == ","):
            pieces.append(source[start:at])
            start = at + 1
        if depth == 0:
            return pieces, at
    return [], len(source)


def _range_of(content: str) -> Iterator[str] | None:
    """Return the numbers or letters of a range; None: it is none."""
    if match := _RANGE.fullmatch(content):
        first, last = int(match[1]), int(match[2])
        step = abs(int(match[3] or 1)) or 1
        is_padded = any(len(one.lstrip("-")) > 1 and one.lstrip("-")[0] == "0" for one in match.group(1, 2))
        width = max(map(len, match.group(1, 2))) if is_padded else 0
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        return (f"{number:0{width}d}" if width else str(number) for number in numbers)
    if match := _LETTERS.fullmatch(content):
        first, last = ord(match[1]), ord(match[2])
        return map(chr, range(first, last + 1) if first <= last else range(first, last - 1, -1))
    return None
