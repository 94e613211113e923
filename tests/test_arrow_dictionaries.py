"""Dictionary-encoded columns of Arrow: batches have their values."""

import random
import struct

import numpy as np
import pytest
from helpers import few_bytes_of_python
from tables import damaged, pa, read_all, rows_of
from test_arrow import WRITERS, write

import gdsdata
from gdsdata.errors import CorruptData
from gdsdata.formats import Arrow, arrow_batches, dictionaries
from gdsdata.formats.tables import TableIndex

feather = pytest.importorskip("pyarrow.feather")
VALUES = {
    "text": pa.array(["b", None, "é", "b", "", "b"]),
    "large": pa.array(["b", None, "é", "b", "", "b"], pa.large_string()),
    "view": pa.array(["b", "x" * 30, "é", "b", "", "b"], pa.string_view()),
    "blob": pa.array([b"\xff", b"", b"\xff", b"a", b"b", None], pa.binary()),
    "label": pa.array([7, -7, 7, 0, 2**40, 7], pa.int64()),
    "small": pa.array([7, 200, 7, 0, 255, 7], pa.uint8()),
    "cost": pa.array([0.5, 0.25, 0.5, 0.125, 1, 1], pa.float32()),
    "day": pa.array([1, 2, 1, 3, 1, 1], pa.int32()).cast(pa.date32()),
    "hash": pa.array([b"abc", b"abd", b"abc", b"abc", b"xyz", b"abc"], pa.binary(3)),
}


def encoded(values: pa.Array, index: pa.DataType | None = None) -> pa.Array:
    array = values.dictionary_encode()
    return array.cast(pa.dictionary(index, values.type)) if index is not None else array


def table_of(values: dict[str, pa.Array]) -> pa.Table:
    return pa.table({name: encoded(array) for name, array in values.items()})


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("rows_a_batch", [2, 9])
def test_values_are_those_of_plain_columns(tmp_path, kind, compression, rows_a_batch):
    write(tmp_path / "a.arrow", table_of(VALUES), kind, rows_a_batch, compression=compression)
    assert read_all(tmp_path) == rows_of(pa.table(VALUES))


@pytest.mark.parametrize("index", [pa.int8(), pa.uint16(), pa.int64()])
def test_indices_may_have_any_width(tmp_path, index):
    write(tmp_path / "a.arrow", pa.table({"x": encoded(VALUES["text"], index)}))
    assert read_all(tmp_path) == rows_of(pa.table({"x": VALUES["text"]}))


def test_members_of_structs_and_lists_are_decoded(tmp_path):
    word = pa.dictionary(pa.int32(), pa.string())
    rows = [{"w": "a", "n": 1}, {"w": None, "n": 2}, {"w": "b", "n": 3}]
    struct_of = pa.StructArray.from_arrays([encoded(pa.array([one["w"] for one in rows])), pa.array([1, 2, 3])], "wn")
    lists = pa.ListArray.from_arrays([0, 2, 2, 3], pa.array(["x", "y", "x"]).dictionary_encode().cast(word))
    write(tmp_path / "a.arrow", pa.table({"s": struct_of, "l": lists}))
    assert read_all(tmp_path) == {
        "s.w": [[97], [], [98]],
        "s.n": [1, 2, 3],
        "l": [list(text) for text in (b'["x", "y"]', b"[]", b'["x"]')],
    }
    assert read_all(tmp_path, format=Arrow(("s.w",))) == {"s.w": [[97], [], [98]]}


@pytest.mark.parametrize("name", ["label", "cost", "day", "hash"])
def test_lists_of_dictionaries_are_lists_of_their_numbers(tmp_path, name):
    def lists_of(values):
        lists = pa.ListArray.from_arrays([0, 2, 2, 6], values)
        pairs = pa.FixedSizeListArray.from_arrays(values, 2)
        return pa.table({"l": lists, "ll": pa.ListArray.from_arrays([0, 0, 1, 3], lists), "f": pairs})

    batches = []
    for folder, values in (("plain", VALUES[name]), ("encoded", encoded(VALUES[name]))):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.arrow", lists_of(values))
        (batch,) = gdsdata.GDSDataset(tmp_path / folder, 3, shuffle=False, device="cpu")
        batches.append({column: str(value) for column, value in batch.items()})
    assert batches[0] == batches[1]


def batches_with_dictionaries(path, parts, kind="stream", **options):
    """Write a record batch for each of ``parts``, with a dictionary of its own."""
    arrays = [pa.array(part).dictionary_encode() for part in parts]
    with WRITERS[kind](
        str(path), pa.schema({"x": arrays[0].type}), options=pa.ipc.IpcWriteOptions(**options)
    ) as writer:
        for array in arrays:
            writer.write_batch(pa.record_batch({"x": array}))


def test_each_record_batch_has_the_dictionary_that_lies_before_it(tmp_path):
    parts = [["a", "b"], ["c"], ["c", "c"], ["b", "a", "d"]]
    batches_with_dictionaries(tmp_path / "a.arrow", parts)
    expected = [list(text.encode()) for part in parts for text in part]
    assert read_all(tmp_path) == {"x": expected}
    data = gdsdata.GDSDataset(tmp_path, 2, device="cpu", shuffle=True, seed=1)
    shuffled = [bytes(one.tolist()) for batch in data for one in batch["x"].as_list()]
    assert sorted(shuffled) == sorted(map(bytes, expected))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_file_may_have_its_dictionaries_behind_its_record_batches(tmp_path, compression):
    write(tmp_path / "a.arrow", table_of(VALUES), rows_a_batch=2, compression=compression)
    by_type = {}
    for message in pa.ipc.MessageReader.open_stream((tmp_path / "a.arrow").read_bytes()):
        by_type[message.type] = by_type.get(message.type, b"") + message.serialize().to_pybytes()
    messages = by_type["schema"] + by_type["record batch"] + by_type["dictionary"]
    ends = b"ARROW1\0\0", struct.pack("<Iii", 0xFFFFFFFF, 0, 0) + b"ARROW1"
    (tmp_path / "a.arrow").write_bytes(ends[0] + messages + ends[1])
    assert read_all(tmp_path) == rows_of(pa.table(VALUES))


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_deltas_follow_the_values_before_them(tmp_path, kind, compression):
    values = ["a", "b", "cc", "", "é"]
    parts = [pa.DictionaryArray.from_arrays([0, i], values[: i + 1]) for i in range(1, 5)]
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True, compression=compression)
    with WRITERS[kind](str(tmp_path / "a.arrow"), pa.schema({"x": parts[0].type}), options=options) as writer:
        for array in parts:
            writer.write_batch(pa.record_batch({"x": array}))
    assert read_all(tmp_path) == {"x": [list(one.encode()) for i in range(1, 5) for one in ("a", values[i])]}


def test_a_record_batch_with_too_many_deltas_says_what_to_do(tmp_path):
    values = [str(i) for i in range(80)]
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    kind = pa.dictionary(pa.int64(), pa.string())
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), pa.schema({"x": kind}), options=options) as writer:
        for i in range(80):
            writer.write_batch(pa.record_batch({"x": pa.DictionaryArray.from_arrays([i], values[: i + 1])}))
    with pytest.raises(ValueError, match="in more than 64 messages .*unify_dictionaries"):
        Arrow().index([str(tmp_path / "a.arrow")])


def test_a_dictionary_that_several_columns_use_and_one_that_none_wants(tmp_path):
    word, other = encoded(pa.array(["a", "b"])), encoded(pa.array([1, 2]))
    write(tmp_path / "a.arrow", pa.table({"x": word, "other": other, "y": word, "n": [5, 6]}))
    assert read_all(tmp_path, format=Arrow(("y", "x", "n"))) == {"y": [[97], [98]], "x": [[97], [98]], "n": [5, 6]}
    index = Arrow(("n",)).index([str(tmp_path / "a.arrow")])
    assert not isinstance(index, TableIndex)  # its rows lie in place


def test_feather_of_categories_and_files_that_are_plain_follow_each_other(tmp_path):
    feather.write_feather(pa.table({"x": encoded(pa.array(["a", "b", "a"]))}), str(tmp_path / "a.feather"))
    feather.write_feather(pa.table({"x": ["c", "a"]}), str(tmp_path / "b.feather"), compression="uncompressed")
    assert read_all(tmp_path) == {"x": [list(one.encode()) for one in "abaca"]}


def test_nulls_among_numbers_are_filled(tmp_path):
    path = write(tmp_path / "a.arrow", pa.table({"x": encoded(pa.array([1, None, 2]))}))
    assert read_all(path, format=Arrow(fill_null=-1)) == {"x": [1, -1, 2]}
    with pytest.raises(ValueError, match="column 'x' has nulls"):
        read_all(path)


def test_dictionaries_of_lists_are_refused_with_the_reason(tmp_path):
    values = pa.DictionaryArray.from_arrays([0, 0], pa.array([[1, 2]]))
    path = write(tmp_path / "a.arrow", pa.table({"x": values, "n": [1, 2]}))
    with pytest.raises(ValueError, match="column 'x' is a dictionary of list.*cast it"):
        Arrow().index([path])
    assert read_all(path, format=Arrow(("n",))) == {"n": [1, 2]}


def test_a_kept_index_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("gdsdata.data.indexing.WORTH_S", 0)
    monkeypatch.setattr("gdsdata.formats.kept_index.SETTLED_NS", 0)
    path = write(tmp_path / "d" / "a.arrow", table_of(VALUES))
    for _ in range(2):
        found = read_all(path, reading=gdsdata.Reading(index_cache=tmp_path / "kept"))
        assert found == rows_of(pa.table(VALUES))
    assert list((tmp_path / "kept").glob("*.gdsdata-index"))


def no_decompressing(decompress):
    """Return pyarrow's function, which may not be asked for much."""

    def checked(content, size_bytes, **how):
        assert size_bytes < 10_000
        return decompress(content, size_bytes, **how)

    return checked


class TestDamage:
    """Files that lie, or that would take much memory."""

    @pytest.mark.parametrize("values", [[b"x" * (1 << 21)], [b"x"] * 3])
    @pytest.mark.parametrize("compression", ["zstd", "lz4"])
    def test_decompressed_bytes_count_for_the_bound_of_a_record_batch(self, tmp_path, monkeypatch, values, compression):
        most = 1 << 22 if len(values) == 1 else 80
        monkeypatch.setattr(arrow_batches, "LARGEST_BATCH_BYTES", most)
        for name, column in {"plain": pa.array(values), "dictionary": encoded(pa.array(values))}.items():
            path = write(tmp_path / f"{name}.arrow", pa.table({"x": column}), compression=compression)
            with few_bytes_of_python(2**20), pytest.raises(ValueError, match=f"when decoded, and the most is {most}"):
                Arrow().index([path])

    @pytest.mark.parametrize("said", [2**31, 2**62, -2])
    @pytest.mark.parametrize("column", ["number", "text"])
    def test_a_length_of_a_compressed_buffer_that_lies_is_not_allocated(self, tmp_path, monkeypatch, said, column):
        table = pa.table({"number": [2**40] * 9, "text": ["x" * 50] * 9}).select([column])
        path = tmp_path / "a.arrow"
        write(path, table, rows_a_batch=9, compression="zstd")
        true = struct.pack("<q", 72 if column == "number" else 450)
        sound = path.read_bytes()
        assert sound.count(true + b"\x28\xb5\x2f\xfd") == 1
        path.write_bytes(sound.replace(true + b"\x28\xb5\x2f\xfd", struct.pack("<q", said) + b"\x28\xb5\x2f\xfd"))
        monkeypatch.setattr(pa, "decompress", no_decompressing(pa.decompress))
        with pytest.raises(ValueError, match="would have -?\\d+ bytes when decompressed|may take .* when decoded"):
            read_all(path)

    def test_a_batch_whose_dictionary_is_missing_is_corrupt(self, tmp_path):
        path = write(tmp_path / "a.arrow", pa.table({"x": encoded(pa.array(["a", "b"]))}))
        sound = (tmp_path / "a.arrow").read_bytes()
        begins, at = [], 0
        while at < len(sound) - 8:
            begins.append(at)
            message = pa.ipc.read_message(pa.py_buffer(sound[at:]))
            at += 8 + struct.unpack_from("<i", sound, at + 4)[0] + (message.body.size if message.body else 0)
        (tmp_path / "a.arrow").write_bytes(sound[: begins[1]] + sound[begins[2] :])
        with pytest.raises(CorruptData, match="its dictionary 0 does not lie before it"):
            Arrow().index([path])

    def test_a_long_value_that_many_rows_name_is_not_allocated(self, tmp_path, monkeypatch):
        monkeypatch.setattr(dictionaries, "_LARGEST_BYTES", 10**6)
        values = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int8()), ["x" * 10_000])
        path = write(tmp_path / "a.arrow", pa.table({"x": values}), rows_a_batch=1000)
        read_all(write(tmp_path / "b.arrow", pa.table({"x": ["imports what reads tables"]})))
        with few_bytes_of_python(2**20), pytest.raises(ValueError, match=r"10000000 bytes in the 1000 rows.*columns="):
            read_all(path)

    def test_a_long_value_that_very_many_rows_name_is_refused_when_it_is_indexed(self, tmp_path):
        values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(500_000, np.int8)), ["x" * 10_000])
        path = write(tmp_path / "a.arrow", pa.table({"x": values}), rows_a_batch=10**6)
        with pytest.raises(ValueError, match=r"record batch of 500000 rows .* may take 5\d+ bytes when decoded"):
            Arrow().index([path])

    @pytest.mark.parametrize("kind", WRITERS)
    def test_a_damaged_file_is_read_or_refused(self, tmp_path, kind):
        path = tmp_path / "a.arrow"
        batches = table_of({name: VALUES[name] for name in ("text", "label")})
        write(path, batches, kind, compression="lz4")
        sound, rng, outcomes = path.read_bytes(), random.Random(kind), set()
        for _ in range(150):
            path.write_bytes(damaged(sound, rng))
            try:
                read_all(path, format=Arrow())
                outcomes.add("read")
            except ValueError as error:
                outcomes.add(type(error).__name__)
        assert {"read", "CorruptData"} <= outcomes
