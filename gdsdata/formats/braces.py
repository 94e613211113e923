"""``{0000..0003}`` and ``{a,b}`` in sources, as shells and WebDataset expand them."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gdsdata.storage.urls import is_remote

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", re.ASCII)
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])")
# Names that one source may mean, and the characters of all of them: a digit too many must not
# become memory.
_MOST_NAMES = 10**6
_MOST_CHARACTERS = 2**28
_MOST_DIGITS = 18
_MOST_BRACES = 100


class _Names(NamedTuple):
    """Names that are made when they are asked for.

    Attributes:
        number: of names; one may be there twice.
        longest: characters of the longest name, or more.
        make: yields the names.
    """

    number: int
    longest: int
    make: Callable[[], Iterable[str]]


def expanded(source: str) -> list[str]:
    """Return the names that a source means: itself, if it has no braces or is a file with them.

    The braces of a folder that exists are its own.

    Raises:
        ValueError: they are more than a million, or longer than 256 million characters in all. Or
            the source has more than 100 opening braces, or numbers of more than 18 digits.
    """
    if "{" not in source or (not is_remote(source) and os.path.lexists(source)):
        return [source]
    literal = 0 if is_remote(source) else _literal_length(source)
    try:
        names = _names_of(source[literal:])
    except ValueError as reason:
        raise ValueError(f"{_shortened(source)}: {reason}") from None
    if names.number > _MOST_NAMES:
        raise ValueError(f"{_shortened(source)} means more than {_MOST_NAMES} names: use a glob, or shorter ranges")
    if (characters := names.number * (literal + names.longest)) > _MOST_CHARACTERS:
        raise ValueError(
            f"{_shortened(source)} means names of {characters} characters in all, and the most is {_MOST_CHARACTERS}: "
            f"use a glob, or shorter ranges"
        )
    return list(dict.fromkeys(source[:literal] + name for name in names.make()))


def _shortened(source: str) -> str:
    return source if len(source) <= 200 else f"{source[:200]}..."


def _literal_length(source: str) -> int:
    """Return the length of the longest folder with braces that exists; 0: there is none."""
    first = source.find("{")
    ends = (at for at in range(len(source) - 1, first, -1) if source[at] == "/")
    return next((end + 1 for end in ends if os.path.lexists(source[:end])), 0)


def _names_of(source: str) -> _Names:
    """Return the names that a source means.

    Raises:
        ValueError: it has too many braces, or a number of too many digits.
    """
    if (braces := source.count("{")) > _MOST_BRACES:
        raise ValueError(f"it has {braces} times an opening brace, and the most is {_MOST_BRACES}: name a folder")
    factors: list[_Names] = []
    at = 0
    while (begin := source.find("{", at)) >= 0:
        pieces, end = _pieces(source, begin)
        if not pieces:  # it is never closed
            factors.append(_literal(source[at : begin + 1]))
            at = begin + 1
            continue
        factors += [_literal(source[at:begin]), _alternatives(pieces)]
        at = end + 1
    return _product([*factors, _literal(source[at:])])


def _alternatives(pieces: list[str]) -> _Names:
    """Return the names that braces mean, by what commas separate in them."""
    if len(pieces) > 1:
        parts = list(map(_names_of, pieces))
        return _Names(
            sum(part.number for part in parts),
            max(part.longest for part in parts),
            lambda: itertools.chain.from_iterable(part.make() for part in parts),
        )
    return _range_of(pieces[0]) or _product([_literal("{"), _names_of(pieces[0]), _literal("}")])


def _literal(text: str) -> _Names:
    return _Names(1, len(text), lambda: (text,))


def _product(factors: list[_Names]) -> _Names:
    """Return the names of several parts, one behind the other."""
    return _Names(
        math.prod(factor.number for factor in factors),
        sum(factor.longest for factor in factors),
        lambda: map("".join, itertools.product(*(factor.make() for factor in factors))),
    )


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


def _range_of(content: str) -> _Names | None:
    """Return the numbers or letters of a range; None: it is none."""
    if match := _RANGE.fullmatch(content):
        said = [one for one in match.groups() if one is not None]
        if (digits := max(len(one.lstrip("-")) for one in said)) > _MOST_DIGITS:
            raise ValueError(f"its braces have a number of {digits} digits, and the most is {_MOST_DIGITS}")
        first, last = int(match[1]), int(match[2])
        step = abs(int(match[3] or 1)) or 1
        is_padded = any(len(one.lstrip("-")) > 1 and one.lstrip("-")[0] == "0" for one in said[:2])
        width = max(map(len, said[:2]))
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        return _Names(
            (abs(last - first) // step) + 1,  # len() takes no more than 2**63 - 1
            width,
            lambda: (f"{number:0{width}d}" if is_padded else str(number) for number in numbers),
        )
    if match := _LETTERS.fullmatch(content):
        first, last = ord(match[1]), ord(match[2])
        letters = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        return _Names(len(letters), 1, lambda: map(chr, letters))
    return None
