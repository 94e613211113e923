"""Changes of bytes, by which `fuzz.py` makes new inputs of known ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from fuzz_target import Files

LARGEST_INPUT_BYTES = 2**18

_WIDTHS = (1, 2, 4, 8)
_NUMBERS = [n for bits in (7, 8, 15, 16, 24, 31, 32, 62, 63, 64) for n in (2**bits - 1, 2**bits, 2**bits + 1)]
_NUMBERS += [*range(17), 64, 65, 100, 255, 511, 512, 513, 4095, 4096, 4097, 10**18, 10**19, 10**30]
_DIGITS = frozenset(b"0123456789")
# A range that is repeated this often becomes deep if it nests, and long if it does not.
_MANY_TIMES = (2, 10, 100, 1000, 20_000)


def mutated(files: Files, others: Sequence[Files], tokens: Sequence[bytes], dice: random.Random) -> Files:
    """Make one or a few changes to one or two files, with ranges of ``others`` among them."""
    changed = dict(files)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        name = dice.choice(sorted(changed))
        data = bytearray(changed[name])
        change = dice.choice(_CHANGES)
        change(data, dice, dice.choice(others).get(name, b""), tokens)
        changed[name] = bytes(data[:LARGEST_INPUT_BYTES])
    return changed


def _flip(data: bytearray, dice: random.Random, *_: Any) -> None:
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _set_byte(data: bytearray, dice: random.Random, *_: Any) -> None:
    if data:
        data[dice.randrange(len(data))] = dice.randrange(256)


def _set_number(data: bytearray, dice: random.Random, *_: Any) -> None:
    """Write a small number, a limit, the file's own size, or a number near the old one."""
    width = dice.choice(_WIDTHS)
    if len(data) < width:
        return
    at, order = dice.randrange(len(data) - width + 1), dice.choice(("little", "big"))
    there = int.from_bytes(data[at : at + width], order)
    value = dice.choice((dice.choice(_NUMBERS), len(data), there + dice.randint(-16, 16), -dice.choice(_NUMBERS)))
    data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, order)


def _set_digits(data: bytearray, dice: random.Random, *_: Any) -> None:
    """Replace a number in text, such as JSON or a header."""
    places = [i for i, octet in enumerate(data[:65536]) if octet in _DIGITS]
    if not places:
        return
    begin = end = dice.choice(places)
    while begin and data[begin - 1] in _DIGITS:
        begin -= 1
    while end < len(data) and data[end] in _DIGITS:
        end += 1
    value = dice.choice((dice.choice(_NUMBERS), int(data[begin:end][:18]) + dice.randint(-2, 2)))
    text = dice.choice((b"%d", b"%o", b"%d.5", b"-%d")) % abs(value)
    # Either as wide as before, for fields of fixed width, or as long as the new number is.
    data[begin:end] = text.rjust(end - begin, b"0")[: end - begin] if dice.random() < 0.5 else text


def _cut_off(data: bytearray, dice: random.Random, *_: Any) -> None:
    del data[dice.randrange(len(data) + 1) :]


def _range(data: bytes | bytearray, dice: random.Random) -> tuple[int, int]:
    begin = dice.randrange(len(data) + 1)
    return begin, min(len(data), begin + dice.choice((1, 2, 4, 8, 16, 64, 512, dice.randrange(1 + len(data)))))


def _cut_out(data: bytearray, dice: random.Random, *_: Any) -> None:
    begin, end = _range(data, dice)
    del data[begin:end]


def _insert(data: bytearray, dice: random.Random, *_: Any) -> None:
    at = dice.randrange(len(data) + 1)
    count = dice.choice((1, 2, 4, 8, 100, 512))
    data[at:at] = dice.choice((dice.randbytes(count), bytes(count), b"\xff" * count))


def _repeat(data: bytearray, dice: random.Random, *_: Any) -> None:
    begin, end = _range(data, dice)
    times = min(dice.choice(_MANY_TIMES), LARGEST_INPUT_BYTES // max(1, end - begin))
    data[end:end] = data[begin:end] * times


def _splice(data: bytearray, dice: random.Random, other: bytes, *_: Any) -> None:
    begin, end = _range(other, dice)
    at = dice.randrange(len(data) + 1)
    data[at : at + dice.choice((0, end - begin))] = other[begin:end]


def _put_token(data: bytearray, dice: random.Random, other: bytes, tokens: Sequence[bytes]) -> None:
    token, times = dice.choice(tokens or (b"\0",)), dice.choice((1, 1, 1, 1, *_MANY_TIMES))
    at = dice.randrange(len(data) + 1)
    data[at : at + dice.choice((0, len(token)))] = token * min(times, 1 + LARGEST_INPUT_BYTES // len(token))


_CHANGES: list[Callable[..., None]] = [
    *(_flip, _set_byte, _set_number, _set_number, _set_digits, _set_digits),
    *(_cut_off, _cut_out, _insert, _repeat, _splice, _put_token, _put_token),
]
