"""CRC-32C (Castagnoli) in numpy, of many strings of bytes at once.

A CRC without its complements is linear: that of ``a + b`` is that of ``a`` moved on by as many zeros as ``b`` has,
XORed with that of ``b``; and zeros in front change nothing. So strings are filled up in front to the same power of two
and folded in half, all of them at once, until one word of each is left.

Source of the polynomial and its complements: https://datatracker.ietf.org/doc/html/rfc3720#appendix-B.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_POLYNOMIAL = 0x82F63B78  # bit-reversed, for a register that shifts to the right
_COMPLEMENT = np.uint32(0xFFFFFFFF)
_WORD = np.dtype("<u4")
_WORD_LOG2_BYTES = 2

Bytes = bytes | bytearray | memoryview


def crc32c(strings: Sequence[Bytes]) -> np.ndarray:
    """The CRC-32C of each of m strings of bytes, as uint32 (m,).

    Takes a few times m times the longest, rounded up to a power of two, in memory.
    """
    lengths = np.array([len(string) for string in strings], np.int64)
    longest = int(lengths.max(initial=_WORD.itemsize))
    rows = np.zeros((len(strings), 1 << (longest - 1).bit_length()), np.uint8)
    for row, string in zip(rows, strings, strict=True):
        row[len(row) - len(string) :] = np.frombuffer(string, np.uint8)
    return crc32c_of_rows(rows, lengths)


def crc32c_of_rows(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The CRC-32C of the end of each row.

    Args:
        rows: uint8 (m, w), w a power of two no less than 4; zeros but for the ends.
        lengths: int64 (m,), bytes of each row's end; (1,) where all are alike.

    Returns:
        uint32 (m,).
    """
    words = np.ascontiguousarray(rows).view(_WORD)
    while (half := words.shape[1] // 2) > 0:
        moved = _moved_on(words[:, :half], _WORD_LOG2_BYTES + half.bit_length() - 1)
        words = moved ^ words[:, half:]
    complement = np.full(len(lengths), _COMPLEMENT)
    begun = crc32c_joined(complement, complement, lengths)
    return _moved_on(words[:, 0], _WORD_LOG2_BYTES) ^ begun


def crc32c_joined(first: np.ndarray, second: np.ndarray, second_bytes: np.ndarray) -> np.ndarray:
    """The CRC-32C (uint32 (m,)) of pairs of strings laid end to end, from that of each and the length of the second."""
    for log2_bytes in range(int(second_bytes.max(initial=0)).bit_length()):
        first = np.where(second_bytes >> log2_bytes & 1, _moved_on(first, log2_bytes), first)
    return first ^ second


def _moved_on(registers: np.ndarray, log2_bytes: int) -> np.ndarray:
    """Registers after ``2**log2_bytes`` zeros; in their shape."""
    tables = _tables(log2_bytes)
    octets = np.ascontiguousarray(registers, _WORD).view(np.uint8).reshape(*registers.shape, _WORD.itemsize)
    moved = tables[0][octets[..., 0]]
    for table, octet in zip(tables[1:], np.moveaxis(octets, -1, 0)[1:], strict=True):
        moved ^= table[octet]
    return moved


@lru_cache
def _tables(log2_bytes: int) -> np.ndarray:
    """What each value of each of a register's four bytes becomes after ``2**log2_bytes`` zeros: uint32 (4, 256)."""
    registers = np.arange(256, dtype=_WORD) << 8 * np.arange(4, dtype=_WORD)[:, None]
    if log2_bytes:
        return _moved_on(_moved_on(registers, log2_bytes - 1), log2_bytes - 1)
    for _ in range(8):
        registers = registers >> 1 ^ (registers & 1) * np.uint32(_POLYNOMIAL)
    return registers
