"""Tables for the tests of Arrow and Parquet: awkward ones, and their rows as batches have them."""

import random

import numpy as np
import pytest
from helpers import grouped

import gdsdata

pa = pytest.importorskip("pyarrow")


def awkward(rows: int, seed: int = 0) -> pa.Table:
    """Make numbers, strings, lists and structs of them, with nulls and sliced buffers."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    more = rows + 3

    def some(value):
        return [None if rng.random() < 0.2 else value() for _ in range(more)]

    boxes = pa.FixedSizeListArray.from_arrays(pa.array(numbers.random(more * 6), pa.float32()), 3)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string()), ("in", pa.struct([("w", pa.string())]))])
    columns = {
        "i64": pa.array(numbers.integers(-(2**62), 2**62, more)),
        "u8": pa.array(numbers.integers(0, 256, more), pa.uint8()),
        "f16": pa.array(numbers.random(more).astype(np.float16)),
        "day": pa.array(numbers.integers(0, 20_000, more), pa.int32()).cast(pa.date32()),
        "time": pa.array(numbers.integers(0, 2**60, more), pa.timestamp("us")),
        "box": pa.FixedSizeListArray.from_arrays(boxes, 2),
        "hash": pa.array([rng.randbytes(5) for _ in range(more)], pa.binary(5)),
        "text": pa.array(some(lambda: "é" * rng.randrange(5)), pa.string()),
        "blob": pa.array(some(lambda: rng.randbytes(rng.randrange(9))), pa.large_binary()),
        "tokens": pa.array(some(lambda: [rng.randrange(999) for _ in range(rng.randrange(4))]), pa.list_(pa.uint16())),
        "far": pa.array(some(lambda: [rng.random()] * rng.randrange(3)), pa.large_list(pa.float64())),
        "image": pa.array(some(lambda: {"bytes": rng.randbytes(3), "path": None, "in": {"w": "w"}}), image),
    }
    return pa.table(columns).slice(2, rows)


def nested(rows: int) -> pa.Table:
    """Make columns that have to be decoded, with nulls."""
    rng = random.Random(rows)
    texts = [None if rng.random() < 0.2 else "é" * rng.randrange(20) for _ in range(rows)]
    lists = [None if rng.random() < 0.2 else [[rng.randrange(99)] * rng.randrange(3), []] for _ in range(rows)]
    return pa.table(
        {
            "flag": pa.array([None, *[True] * (rows - 1)]),
            "deep": pa.array(lists, pa.list_(pa.large_list(pa.int16()))),
            "messages": [None if text is None else [{"role": text, "n": None, "b": text.encode()}] for text in texts],
            "map": pa.array([[("a", 1)]] * rows, pa.map_(pa.string(), pa.int8())),
            "cost": pa.array(range(rows), pa.decimal128(7, 2)),
            "text": pa.array(texts, pa.string_view() if rows % 2 else pa.string()),
            "nothing": pa.nulls(rows),
        }
    )


def rows_of(table: pa.Table) -> dict[str, list]:
    """Return each column as batches have it: numbers for bytes, empty for null."""
    while any(pa.types.is_struct(column.type) for column in table.columns):
        table = table.flatten()
    return {name: _values_of(column) for name, column in zip(table.column_names, table.columns, strict=True)}


def _values_of(column: pa.ChunkedArray) -> list:
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
    values = ["" if value is None else value for value in column.to_pylist()]
    return [list(one.encode() if isinstance(one, str) else one) if hasattr(one, "__len__") else one for one in values]


def rows_in(batches) -> dict[str, list]:
    """Return the rows of batches in the same form."""
    rows: dict[str, list] = {}
    for batch in batches:
        for name, values in batch.items():
            each = values.as_list() if isinstance(values, gdsdata.Ragged) else values
            rows.setdefault(name, []).extend(one.tolist() for one in each)
    return rows


def read_all(source, **arguments) -> dict[str, list]:
    """Return the rows in the order of the files."""
    return rows_in(
        gdsdata.GDSDataset(source, **grouped({"batch_size": 5, "shuffle": False, "device": "cpu", **arguments}))
    )


def damaged(sound: bytes, rng: random.Random) -> bytes:
    """Change a few numbers in ``sound``, some of them to absurd values."""
    content = bytearray(sound)
    for _ in range(rng.randint(1, 4)):
        size = rng.choice([1, 1, 2, 4, 8])
        value = rng.choice([rng.randrange(256), -1, 2**31 - 1, 2**62, 2**63 - 1])
        at = rng.randrange(len(content) - size)
        content[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(content)


def with_integers_of_128_bits(schema: bytes) -> bytes:
    """Return a serialized schema with one column of 64 bits as Polars writes one of 128."""
    assert schema.count((64).to_bytes(4, "little")) == 1
    return schema.replace((64).to_bytes(4, "little"), (128).to_bytes(4, "little"))
