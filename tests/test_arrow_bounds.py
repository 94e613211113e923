"""Arrow files that are decoded: sizes in metadata become no values or memory that are not there."""

import json
import struct

import numpy as np
import pytest
from tables import pa, read_all
from test_arrow import write

import gdsdata
from gdsdata.errors import CorruptData
from gdsdata.formats import Arrow, arrow_batches, dictionaries
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


def written(tmp_path, column, **options):
    """Write a column as one record batch, and return the path."""
    return write(tmp_path / "a.arrow", pa.table({"x": column}), rows_a_batch=len(column), **options)


def test_bytes_between_the_buffers_of_columns_count_for_the_bound(tmp_path):
    path, body_bytes = tmp_path / "a.arrow", 2**30
    write(path, pa.table({f"c{i}": pa.array([1, None, 2, 3], pa.int8()) for i in range(50)}))
    data, message = record_batch_in(path)
    places = message.header.int64s(2, 2).copy()
    places[1::2, 0] = body_bytes - 8
    data = bytearray(with_places(data, message, places))
    root = struct.unpack_from("<I", message.frame, 8)[0] + 8
    at = message.at + type(message.header)(message.frame, root).place(3)
    data[at : at + 8] = struct.pack("<q", body_bytes)
    with path.open("wb") as file:  # sparse
        file.write(data[: message.body_at + message.body_bytes])
        file.seek(message.body_at + body_bytes)
        file.write(b"\xff\xff\xff\xff\0\0\0\0")
    with pytest.raises(ValueError, match=r"may take 5\d{10} bytes when decoded"):
        Arrow(fill_null=0).index([str(path)])


def lists_of(values):
    """Return one list with all values."""
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


LONG_WORDS = {"text": pa.array(["x" * 2**14]), "fixed": pa.array([b"x" * 2**14], pa.binary(2**14))}


@pytest.mark.parametrize("kind", LONG_WORDS)
@pytest.mark.parametrize("around", [lists_of, lambda values: pa.FixedSizeListArray.from_arrays(values, 2**10)])
def test_dictionaries_in_lists_count_for_the_bound(tmp_path, kind, around):
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**18, np.int8)), LONG_WORDS[kind])
    for column in (around(words), around(pa.StructArray.from_arrays([words], ["w"]))):
        with pytest.raises(ValueError, match="may take .* when decoded"):
            Arrow().index([written(tmp_path, column)])


def test_dictionaries_of_long_fixed_size_values_are_decoded_within_a_bound(monkeypatch):
    monkeypatch.setattr(dictionaries, "_LARGEST_BYTES", 10**6)
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(62, np.int8)), LONG_WORDS["fixed"])
    with pytest.raises(dictionaries.TooLarge, match="1015808 bytes in the 62 rows"):
        dictionaries.decoded(words)
    assert len(dictionaries.decoded(words[:61])) == 61


def test_names_in_json_count_for_the_bound(tmp_path):
    flags = pa.array(np.ones(2**20, bool))
    path = written(tmp_path, lists_of(pa.StructArray.from_arrays([flags], ["n" * 400])), compression="zstd")
    assert Arrow().index([path]).decoded_bytes[0] > 2**20 * 400
    path = written(tmp_path, lists_of(pa.StructArray.from_arrays([flags], ["é" * 2000])), compression="zstd")
    with pytest.raises(ValueError, match=r"may take 4\d{9} bytes when decoded"):
        Arrow().index([path])


def test_a_struct_may_have_more_categories_than_a_dictionary_may_have_parts(tmp_path):
    word = pa.array(["a", "b", "a"]).dictionary_encode()
    path = written(tmp_path, pa.StructArray.from_arrays([word] * 66, [f"m{i}" for i in range(66)]))
    assert read_all(path) == {f"x.m{i}": [[97], [98], [97]] for i in range(66)}


NOTHING = {
    "dictionary": (pa.DictionaryArray.from_arrays([0, 599], pa.nulls(600)), [[], []]),
    "list": (lists_of(pa.nulls(600)), [list(b"[" + b", ".join([b"null"] * 600) + b"]")]),
    "fixed": (pa.FixedSizeListArray.from_arrays(pa.nulls(600), 600), [list(b"[" + b", ".join([b"null"] * 600) + b"]")]),
    "struct": (
        lists_of(pa.StructArray.from_arrays([pa.nulls(600)], ["n"])),
        [list(b"[" + b", ".join([b'{"n": null}'] * 600) + b"]")],
    ),
}


@pytest.mark.parametrize("kind", NOTHING)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_values_that_take_no_bytes_are_read(tmp_path, kind, compression):
    column, expected = NOTHING[kind]
    assert read_all(written(tmp_path, column, compression=compression)) == {"x": expected}


def test_very_many_nulls_in_lists_are_refused(tmp_path):
    with pytest.raises(ValueError, match="may take .* when decoded"):
        Arrow().index([written(tmp_path, lists_of(pa.nulls(2**27)))])
    with pytest.raises(CorruptData, match="lists have 134217729 values"):
        Arrow().index([written(tmp_path, lists_of(pa.nulls(2**27 + 1)))])


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_dictionary_without_values_may_stand_behind_nulls(tmp_path, compression):
    kind = pa.struct([("m", pa.dictionary(pa.int8(), pa.string())), ("n", pa.dictionary(pa.int8(), pa.int64()))])
    path = written(tmp_path, pa.array([None, None], kind), compression=compression)
    assert read_all(path, format=Arrow(fill_null=7)) == {"x.m": [[], []], "x.n": [7, 7]}
    index = written(tmp_path, pa.array([None, None], pa.dictionary(pa.int8(), pa.string())), compression=compression)
    assert read_all(index) == {"x": [[], []]}


def test_a_large_dictionary_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_batches, "LARGEST_BATCH_BYTES", 10_000)
    words = pa.DictionaryArray.from_arrays([0, 1], ["x" * 10_000, "y"])
    with pytest.raises(ValueError, match=r"dictionaries take 4\d+ of them: cast the columns to their values' type"):
        Arrow().index([written(tmp_path, words)])
    with pytest.raises(ValueError, match="write smaller ones"):
        Arrow().index([written(tmp_path, words.dictionary_decode(), compression="zstd")])


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_names_with_dots_and_structs_of_one_name(tmp_path, compression):
    structs = [
        pa.StructArray.from_arrays([pa.array(values)], [name]) for values, name in (([1, 2], "c"), ([3, 4], "d"))
    ]
    tables = [
        (pa.table({"a": structs[0], "a.b": [5, 6]}), {"a.c": [1, 2], "a.b": [5, 6]}),
        (pa.Table.from_arrays(structs, ["s", "s"]), {"s.c": [1, 2], "s.d": [3, 4]}),
    ]
    for i, (table, expected) in enumerate(tables):
        path = write(tmp_path / f"{i}.arrow", table, compression=compression)
        assert read_all(path) == expected
        assert read_all(path, format=Arrow(tuple(expected)[1:])) == dict(list(expected.items())[1:])


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("kind", [pa.list_(pa.list_(pa.string())), pa.list_(pa.map_(pa.string(), pa.int8()))])
def test_a_record_batch_with_empty_lists_alone_may_have_the_offsets_of_others(tmp_path, kind, compression):
    rows = [[[("a", 1)] if pa.types.is_map(kind.value_type) else ["a"]] * 5000, []]
    table = pa.table({"x": pa.array(rows, kind)})
    path = write(tmp_path / "a.arrow", table, "stream", 1, compression=compression)
    data = gdsdata.GDSDataset(path, 2, shuffle=False, device="cpu", fields=gdsdata.Fields(decode={"x": "json"}))
    (batch,) = data
    assert batch["x"] == json.loads(json.dumps(rows))
