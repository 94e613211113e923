"""Names in the order of the numbers in them."""

from __future__ import annotations

import re


def by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts by the values of the numbers in a name: "a2" before "a10".

    A number may have any length. Python's own would refuse one of more than 4300 digits.
    """
    return [_value(part) if place % 2 else (0, part) for place, part in enumerate(re.split(r"([0-9]+)", name))]


def _value(digits: str) -> tuple[int, str]:
    significant = digits.lstrip("0")
    return len(significant), significant
