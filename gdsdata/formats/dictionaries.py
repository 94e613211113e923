"""Dictionary-encoded values, decoded within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdsdata.formats.columns import arrow_module, is_bytes, is_text, storage_of

if TYPE_CHECKING:
    import pyarrow

# A few bytes of indices may name a long value many times.
_LARGEST_BYTES = 2**32


class TooLarge(Exception):
    """Values would take more memory than a record batch or row group may take."""


def decoded(array: pyarrow.DictionaryArray) -> pyarrow.Array:
    """Return the values that an array's indices name. Offsets of texts and bytes have 64 bits.

    Raises:
        TooLarge: see there.
    """
    arrow, compute, values = arrow_module(), arrow_module("pyarrow.compute"), array.dictionary
    kind = storage_of(values.type)
    if is_bytes(kind):
        values = values.cast(arrow.large_string() if is_text(kind) else arrow.large_binary())
        total_bytes = compute.sum(compute.binary_length(values).take(array.indices)).as_py() or 0
    else:
        total_bytes = len(array) * (0 if arrow.types.is_null(kind) else kind.bit_width) // 8
    if total_bytes > _LARGEST_BYTES:
        raise TooLarge(
            f"its dictionary's values take {total_bytes} bytes in the {len(array)} rows, and the most is "
            f"{_LARGEST_BYTES}"
        )
    return values.take(array.indices)
