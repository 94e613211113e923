"""LitData's shards with rows of Arrow behind them, as 0.2.76 writes samples of plain values."""

import random
import struct

import pytest
from shard_files import edit_json, pack_shard, set_at
from tables import damaged, pa, read_all, rows_of
from test_litdata import write_index

import gdsdata
from gdsdata.errors import CorruptData
from gdsdata.formats import LitData, arrow
from gdsdata.formats.tables import TableIndex

MAGIC = b"LDARW01\0"
ROWS = [{"text": "é" * i, "image": b"\xff" * i, "n": i, "x": i / 2} for i in range(7)]


def with_rows(table, body=None, rows_a_batch=3, new=pa.ipc.new_file, **options):
    """Return a shard with a table behind it; its samples are empty, or ``body``."""
    sink = pa.BufferOutputStream()
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows_a_batch)
    rows = sink.getvalue().to_pybytes()
    return pack_shard(body or [b""] * len(table)) + rows + struct.pack("<I", len(rows)) + MAGIC


def write_rows(folder, tables, **options):
    """Write such shards, and return their index.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = [with_rows(table, **options) for table in tables]
    tree = dict.fromkeys(tables[0].column_names, 0)
    return write_index(folder, shards, list(map(len, tables)), tree, ["str"] * len(tree))


def two_tables():
    return [pa.Table.from_pylist(ROWS[:4]), pa.Table.from_pylist(ROWS[4:])]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_samples_are_the_rows(tmp_path, compression, new):
    path = write_rows(tmp_path, two_tables(), compression=compression, new=new)
    assert read_all(tmp_path) == rows_of(pa.Table.from_pylist(ROWS))
    assert isinstance(LitData().index([path]), TableIndex) == (compression is not None)


def test_samples_before_the_rows_are_not_looked_at(tmp_path):
    write_rows(tmp_path, two_tables()[:1], body=[b"old"] * 4)
    assert read_all(tmp_path) == rows_of(two_tables()[0])


def test_a_sample_that_ends_as_rows_do_is_a_sample(tmp_path):
    values = [b"first", b"last" + MAGIC]
    shard = pack_shard([struct.pack("<I", len(value)) + value for value in values])
    write_index(tmp_path, [shard], [2], {"a": 0}, ["bytes"])
    assert [bytes(value) for value in read_all(tmp_path)["a"]] == values


def test_windows_of_rows_are_refused(tmp_path):
    path = write_rows(tmp_path, two_tables())
    with pytest.raises(ValueError, match="its samples are whole: leave window_tokens out"):
        LitData(window_tokens=4).index([path])


def test_lists_and_dicts_are_what_arrow_makes_of_them(tmp_path):
    rows = [{"ids": [1, 2], "meta": {"a": "x"}, "chat": [{"role": "u"}]}, {"ids": [], "meta": {"a": ""}, "chat": []}]
    write_rows(tmp_path, [pa.Table.from_pylist(rows)])
    found = read_all(tmp_path)
    assert found["ids"] == [[1, 2], []] and found["meta.a"] == [[120], []]
    assert bytes(found["chat"][0]) == b'[{"role": "u"}]'


def test_a_shuffled_epoch_has_every_row_once(tmp_path):
    write_rows(tmp_path, two_tables(), compression="zstd")
    batches = gdsdata.GDSDataset(tmp_path, 3, device="cpu", shuffle=True)
    assert sorted(n for batch in batches for n in batch["n"].tolist()) == list(range(7))


def test_nulls_are_filled_and_shards_without_rows_take_no_value_for_them(tmp_path):
    path = write_rows(tmp_path, [pa.table({"n": [1, None]})])
    assert read_all(path, format=LitData(fill_null=-1)) == {"n": [1, -1]}
    with pytest.raises(ValueError, match="column 'n' has nulls.*LitData"):
        LitData().index([path])
    plain = write_index(tmp_path, [pack_shard([b"\1\0\0\0a"])], [1], {"a": 0}, ["str"])
    with pytest.raises(ValueError, match="have no rows of Arrow: leave fill_null out"):
        LitData(fill_null=0).index([plain])


def test_shards_of_both_kinds_are_damage(tmp_path):
    shards = [with_rows(two_tables()[0]), pack_shard([b"\1\0\0\0a"])]
    path = write_index(tmp_path, shards, [4, 1], {"a": 0}, ["str"])
    with pytest.raises(CorruptData, match="does not end as rows of Arrow do, and other shards have them") as caught:
        LitData().index([path])
    assert caught.value.path.endswith("chunk-0-1.bin")


def test_another_number_of_rows_than_index_json_says_is_damage(tmp_path):
    path = write_rows(tmp_path, two_tables())
    edit_json(tmp_path / "index.json", set_at(["chunks", 1, "chunk_size"], 2))
    with pytest.raises(CorruptData, match="it has 3 rows, and .*index.json says 2"):
        LitData().index([path])


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_shard_is_named_with_the_index_that_lists_it(tmp_path, which):
    path = write_rows(tmp_path, two_tables())
    (tmp_path / f"chunk-0-{which}.bin").unlink()
    with pytest.raises(FileNotFoundError, match=f"{path} lists it"):
        LitData().index([path])


def test_damage_says_from_where_its_bytes_are_counted(tmp_path):
    path = write_rows(tmp_path, two_tables())
    shard = tmp_path / "chunk-0-0.bin"
    content = shard.read_bytes()
    begin = content.index(b"ARROW1")
    shard.write_bytes(content[: begin + 8] + b"xxxx" + content[begin + 12 :])
    with pytest.raises(CorruptData, match=f"bytes 8 to .*counted from {begin}, where Arrow begins") as caught:
        LitData().index([path])
    assert caught.value.offset == begin + 8


def test_bytes_that_are_gone_are_counted_from_there_too(tmp_path):
    begin, rows = 4096, pa.BufferOutputStream()
    with pa.ipc.new_stream(rows, two_tables()[0].schema) as writer:
        writer.write_table(two_tables()[0])
    stream = rows.getvalue().to_pybytes().removesuffix(b"\xff" * 4 + b"\0" * 4)  # without its end mark
    path = tmp_path / "a.bin"
    path.write_bytes(b"\0" * begin + stream)
    with pytest.raises(CorruptData, match=f"bytes {len(stream)} to .*shorter.*counted from {begin}") as caught:
        arrow.index_files([str(path)], None, None, lambda file: (begin, len(stream) + 8))
    assert (caught.value.offset, caught.value.length) == (begin + len(stream), 8)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_damaged_shard_is_read_or_refused(tmp_path, compression):
    path = write_rows(tmp_path, two_tables(), compression=compression)
    shard, rng, outcomes = tmp_path / "chunk-0-0.bin", random.Random(1), set()
    sound = shard.read_bytes()
    for i in range(150):
        content = damaged(sound, rng) if i % 3 else sound[: rng.randrange(len(sound))]
        shard.write_bytes(content)
        edit_json(tmp_path / "index.json", set_at(["chunks", 0, "chunk_bytes"], len(content)))
        try:
            read_all(path)
            outcomes.add("read")
        except ValueError as error:
            outcomes.add(type(error).__name__)
    assert {"read", "CorruptData"} <= outcomes


class TestLightning:
    """Comparison with LitData's own writer."""

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_reads_what_its_writer_writes(self, tmp_path, compression):
        writer = pytest.importorskip("litdata.streaming.writer", exc_type=ImportError)
        binary = writer.BinaryWriter(str(tmp_path), chunk_bytes=1 << 14, compression=compression)
        samples = [{"text": "é" * i, "image": bytes(i), "n": i, "ids": list(range(i % 5))} for i in range(300)]
        for i, sample in enumerate(samples):
            binary[i] = sample
        binary.done()
        binary.merge()
        assert len(list(tmp_path.glob("*.bin"))) > 1
        assert read_all(tmp_path) == rows_of(pa.Table.from_pylist(samples))
