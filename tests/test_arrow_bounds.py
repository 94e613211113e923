"""Arrow files that are decoded: sizes in metadata become no values or memory that are not there."""

import struct

import numpy as np
import pytest
from tables import pa, read_all
from test_arrow import write

from gdsdata.errors import CorruptData
from gdsdata.formats.arrow_messages import RECORDS, messages


def record_batch_in(path):
    """Return the bytes of a file, and the message of its record batch."""
    data = path.read_bytes()
    found = messages(lambda at, count: data[at : at + count], len(data), str(path))
    return bytearray(data), next(message for message in found if message.kind == RECORDS)


def with_places(data, message, places):
    """Return a file's bytes with other places of the record batch's buffers: int64 (n, 2)."""
    old = message.header.int64s(2, 2).tobytes()
    assert bytes(data).count(old) == 1
    return bytes(data).replace(old, places.tobytes())


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("count", [0, 10, 399, 401])
def test_a_compressed_buffer_of_another_length_than_its_prefix_says_is_damaged(tmp_path, compression, count):
    path, values = tmp_path / "a.arrow", np.random.default_rng(0).integers(0, 2**60, 400)
    write(path, pa.table({"x": values}), rows_a_batch=400, compression=compression)
    assert read_all(path) == {"x": values.tolist()}
    data, message = record_batch_in(path)
    places = message.header.int64s(2, 2).copy()
    other = pa.compress(np.arange(count).tobytes(), codec=compression, asbytes=True)
    at = message.body_at + int(places[1, 0])
    data[at : at + 8 + len(other)] = struct.pack("<q", values.nbytes) + other
    places[1, 1] = 8 + len(other)
    path.write_bytes(with_places(data, message, places))
    with pytest.raises(CorruptData, match="cannot be decoded"):
        read_all(path)
