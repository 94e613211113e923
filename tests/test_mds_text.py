"""MosaicML's shards of JSON, CSV, TSV and XSV: columns are typed, and damage is an error.

The files are those that mosaicml-streaming 0.13.0 wrote.
"""

import gzip
import json
import math
import random
import struct
import tracemalloc

import numpy as np
import pytest
from helpers import grouped
from shard_files import edit_json, set_at
from tables import damaged, pa, rows_in
from test_mds import write_mds

import gdsdata
from gdsdata.errors import CorruptData
from gdsdata.formats import Mds
from gdsdata.formats.tables import TableIndex

pytestmark = pytest.mark.filterwarnings("ignore:gdsdata")

JSON = [
    rb'{"n": -3, "text": "\u00e9, \"q\"\n", "x": 0.1}' + b"\n",
    b'{"n": 1099511627776, "text": "", "x": 1e-300}\n{"n": 0, "text": "tab\\t", "x": Infinity}\n',
]
CSV = 'n,text,x\n-3,é "q",0.1\n1099511627776,,1e-300\n0,tab,inf\n'.encode()
XSV = 'n||text||x\r\n-3||é, "q"\n||0.1\r\n1099511627776||||1e-300\r\n0||tab\t||inf\r\n'.encode()
NUMBERS = {"n": [-3, 2**40, 0], "x": [0.1, 1e-300, math.inf]}
JSON_TEXTS = ['é, "q"\n', "", "tab\t"]
KINDS = {
    "json": (JSON, JSON_TEXTS),
    "csv": ([CSV], ['é "q"', "", "tab"]),
    "tsv": ([CSV.replace(b",", b"\t")], ['é "q"', "", "tab"]),
    "xsv": ([XSV], JSON_TEXTS),
}


def write(folder, kind: str, compressed: bool = False) -> str:
    """Write such a data set, and return its index.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"column_encodings": ["int", "str", "float"], "column_names": ["n", "text", "x"]}
    columns = {"columns": {"n": "int", "text": "str", "x": "float"}} if kind == "json" else names
    columns |= {"separator": "||"} if kind == "xsv" else {}
    listed = []
    for i, content in enumerate(KINDS[kind][0]):
        newline = "\r\n" if kind == "xsv" else "\n"
        name = f"shard.{i:05}.{kind}"
        record = {"compression": None, "format": kind, "hashes": [], "newline": newline, "size_limit": 80, **columns}
        record |= {"version": 2, "samples": content.count(newline.encode()) - (kind != "json")}
        record |= {"raw_data": {"basename": name, "bytes": len(content), "hashes": {}}, "zip_data": None}
        record |= {"raw_meta": {"basename": f"{name}.meta", "bytes": 174, "hashes": {}}, "zip_meta": None}
        if compressed:
            content, name = gzip.compress(content), f"{name}.gz"
            record |= {
                "compression": "gz",
                "zip_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "zip_meta": {"basename": f"shard.{i:05}.{kind}.meta.gz", "bytes": 163, "hashes": {}},
            }
        (folder / name).write_bytes(content)
        listed.append(record)
    path = folder / "index.json"
    path.write_text(json.dumps({"shards": listed, "version": 2}))
    return str(path)


def read(source, format=None, **arguments):
    decode = {"text": "txt"}
    data = gdsdata.GDSDataset(
        source, **grouped({"batch_size": 2, "format": format, "device": "cpu", "shuffle": False, **arguments})
    )
    rows = rows_in(data)
    return {
        name: [bytes(one).decode() for one in values] if name in decode else values for name, values in rows.items()
    }


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_tensors_and_texts_are_texts(tmp_path, kind, compressed):
    write(tmp_path / "data", kind, compressed)
    assert read(tmp_path / "data", Mds(unpacked=str(tmp_path / "kept"))) == {**NUMBERS, "text": KINDS[kind][1]}


def test_a_folder_is_recognized_and_shuffled(tmp_path):
    write(tmp_path, "json")
    assert sorted(read(tmp_path, shuffle=True)["n"]) == sorted(NUMBERS["n"])


def test_a_kept_index_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("gdsdata.data.indexing.WORTH_S", 0)
    monkeypatch.setattr("gdsdata.formats.kept_index.SETTLED_NS", 0)
    path = write(tmp_path / "data", "xsv")
    for _ in range(2):
        found = read(path, reading=gdsdata.Reading(index_cache=tmp_path / "kept"))
        assert found == {**NUMBERS, "text": JSON_TEXTS}
    assert list((tmp_path / "kept").glob("*.gdsdata-index"))


def test_shards_without_samples_and_those_left_out_have_none(tmp_path):
    path = write(tmp_path, "csv")
    (tmp_path / "shard.00000.csv").write_bytes(b"n,text,x\n")
    edit_json(tmp_path / "index.json", set_at(["shards", 0, "samples"], 0))
    edit_json(tmp_path / "index.json", set_at(["shards", 0, "raw_data", "bytes"], 9))
    assert len(Mds().index([path])) == 0
    path = write(tmp_path / "json", "json")
    index = Mds(without=(str(tmp_path / "json" / "shard.00000.json"),)).index([path])
    assert isinstance(index, TableIndex) and len(index) == 2


@pytest.mark.parametrize(
    "kind, way, value, error, said",
    [
        ("json", ["format"], "parquet", ValueError, "shards of format 'parquet': write the dataset with a writer"),
        ("json", ["newline"], ", ", ValueError, "end with ', ', which may stand within JSON.*newline="),
        ("json", ["newline"], "", CorruptData, "newline '' and separator '', which make no sense"),
        ("json", ["columns"], {}, CorruptData, r"columns \[\]"),
        ("json", ["columns", "n"], "int32", ValueError, "the encoding 'int32'; what can be read is int, float, str"),
        ("csv", ["column_names"], ["n", "n", "x"], CorruptData, r"columns \[\]"),
        ("csv", ["column_encodings"], ["int"], CorruptData, r"columns \[\]"),
        ("xsv", ["separator"], "", CorruptData, "make no sense"),
        ("json", ["samples"], 2**31, CorruptData, "2147483648 samples, which take more than the"),
        ("json", ["raw_data", "bytes"], 3, CorruptData, "says 3 bytes"),
    ],
)
def test_a_wrong_index_json_says_what_is_wrong(tmp_path, kind, way, value, error, said):
    path = write(tmp_path, kind)
    edit_json(tmp_path / "index.json", set_at(["shards", 0, *way], value))
    with pytest.raises(error, match=said):
        Mds().index([path])


def test_text_and_mds_in_one_list_are_refused(tmp_path):
    path = write(tmp_path, "json")
    names = {"format": "mds", "column_names": ["n"], "column_encodings": ["int"], "column_sizes": [8]}
    edit_json(tmp_path / "index.json", lambda content: content["shards"][1].update(names))
    with pytest.raises(ValueError, match="some shards are text, and others MDS"):
        Mds().index([path])


@pytest.mark.parametrize("name", ["shard.00000.json", "shard.00001.mds"])
def test_shards_that_are_left_out_are_not_judged(tmp_path, name):
    path = write(tmp_path, "json")
    mds = {"format": "mds", "column_names": ["n"], "column_encodings": ["int"], "column_sizes": [8]}

    def change(content):
        content["shards"][1].update(mds, samples=0, raw_data={"basename": "shard.00001.mds", "bytes": 8})
        left_out = content["shards"][int(name[10])]
        left_out.update({"columns": {"n": "strange"}, "column_encodings": ["strange"]})

    edit_json(tmp_path / "index.json", change)
    (tmp_path / "shard.00001.mds").write_bytes(struct.pack("<2I", 0, 8))
    index = Mds(without=(str(tmp_path / name),)).index([path])
    assert index.field_names == (("n",) if name.endswith("json") else ("n", "text", "x"))


@pytest.mark.parametrize(
    "kind, old, new, said",
    [
        ("json", b'"n"', b'"m"', "a line has no 'n'"),
        ("json", b"-3", b" a", "Expecting value"),
        ("json", b"-3", b"[]", "int64"),
        ("json", b"-3,", b'"",', "int64"),
        ("json", b"0.1}", b"null}"[:4], "Expecting|delimiter"),
        ("json", b"}\n", b"} ", "its last line does not end"),
        ("csv", b"n,text", b"m,text", "its first line has not the columns"),
        ("csv", b"-3,", b"-3;", "a line has not 3 values"),
        ("csv", b"-3", b"-x", "-x"),
        ("csv", b"\xc3\xa9", b"\xff\xff", "utf-8"),
        ("csv", b"0,tab,inf\n", b"", "has 2 rows and should have 3"),
    ],
)
def test_damaged_lines_are_corrupt_and_name_their_shard(tmp_path, kind, old, new, said):
    path = write(tmp_path, kind)
    shard = tmp_path / f"shard.00000.{kind}"
    content = shard.read_bytes().replace(old, new, 1)
    shard.write_bytes(content)
    edit_json(tmp_path / "index.json", set_at(["shards", 0, "raw_data", "bytes"], len(content)))
    with pytest.raises(CorruptData, match=said) as caught:
        read(path)
    assert caught.value.path == str(shard)


def test_bools_in_a_column_of_integers_are_0_and_1(tmp_path):
    content = b'{"x": true}\n{"x": 7}\n{"x": false}\n'
    index = Mds().index([write_one(tmp_path, content, 3, **ONE_INTEGER)])
    (values,) = index.decode(0, [memoryview(content)])
    assert values.dtype == np.dtype("<i8") and values.tolist() == [1, 7, 0]


def test_bools_in_a_column_of_texts_are_damage(tmp_path):
    content = b'{"x": true}\n'
    index = Mds().index([write_one(tmp_path, content, 1, format="json", columns={"x": "str"})])
    with pytest.raises(CorruptData, match="bool"):
        index.decode(0, [memoryview(content)])


@pytest.mark.parametrize("content", [b'{"n": null, "text": "", "x": 1.0}\n', b"[" * 10**5 + b"\n"])
def test_nulls_and_deep_nests_are_corrupt(tmp_path, content):
    path = write(tmp_path, "json")
    (tmp_path / "shard.00000.json").write_bytes(content)
    edit_json(tmp_path / "index.json", set_at(["shards", 0, "raw_data", "bytes"], len(content)))
    with pytest.raises(CorruptData, match="column 'n' has null|nested too deeply"):
        read(path)


def write_one(folder, content: bytes, samples: int, **said) -> str:
    """Write a data set of one shard of text, and return its index.json."""
    raw = {"basename": "shard", "bytes": len(content)}
    record = {"version": 2, "newline": "\n", "samples": samples, "raw_data": raw, "zip_data": None, **said}
    (folder / "shard").write_bytes(content)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [record]}))
    return str(folder / "index.json")


TWO_INTEGERS = {"format": "csv", "column_names": ["a", "b"], "column_encodings": ["int", "int"]}
ONE_INTEGER = {"format": "json", "columns": {"x": "int"}}


@pytest.mark.parametrize(
    "said, begin, line, times",
    [
        (TWO_INTEGERS, b"a,b\n", b"12,345\n", 10**5),
        (ONE_INTEGER, b"", b'{"x": 1}\n', 10**5),
        (ONE_INTEGER, b"", b'{"x": 1, "y": [%s{}]}\n' % (b"{}," * 10**5), 1),
        (ONE_INTEGER, b"", b'{"x": 1, "y": [%s0]}\n' % (b"%s%s," % (b"[" * 100, b"]" * 100) * 1000), 1),
        ({"format": "json", "columns": {"x": "str"}}, b"", '{"x": "😀%s"}\n'.encode() % (b"a" * 10**6), 1),
    ],
)
def test_decoding_takes_no_more_memory_than_is_stated(tmp_path, said, begin, line, times):
    content = begin + line * times
    index = Mds().index([write_one(tmp_path, content, times, **said)])
    index.decode(0, [memoryview(content)])  # whatever is imported late is imported now
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        assert len(index.decode(0, [memoryview(content)])[0]) == times
        peak_bytes = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert peak_bytes <= index.decoded_bytes[0] <= 60 * len(content)
    if times > 1:
        assert index.decoded_bytes[0] < 11 * len(content)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("step_bytes", [1, 2, 3, 5, 16])
def test_lines_are_the_same_in_steps_of_any_size(tmp_path, monkeypatch, newline, step_bytes):
    monkeypatch.setattr("gdsdata.formats.mds_text._STEP_BYTES", step_bytes)
    lines = ["s,n", "é😀,1", "\r,2", ",-3", "a long line,4", *(["\n,5"] if newline != "\n" else [])]
    content = "".join(line + newline for line in lines).encode()
    names = {"column_names": ["s", "n"], "column_encodings": ["str", "int"]}
    rows = [line.split(",") for line in content.decode().split(newline)[1:-1]]
    path = write_one(tmp_path, content, len(rows), format="csv", newline=newline, **names)
    texts, numbers = Mds().index([path]).decode(0, [memoryview(content)])
    assert [text.decode() for text in texts.to_pylist()] == [row[0] for row in rows]
    assert numbers.tolist() == [int(row[1]) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused(tmp_path, kind):
    path = write(tmp_path, kind)
    rng, outcomes = random.Random(kind), set()
    for name in (f"shard.00000.{kind}", "index.json"):
        sound = (tmp_path / name).read_bytes()
        for _ in range(40):
            (tmp_path / name).write_bytes(damaged(sound, rng))
            try:
                read(path)
                outcomes.add("read")
            except (ValueError, FileNotFoundError) as error:
                outcomes.add(type(error).__name__)
        (tmp_path / name).write_bytes(sound)
    assert {"CorruptData"} <= outcomes


def test_columns_of_mds_that_are_text_are_decoded_by_name(tmp_path):
    files = [[[b'{"a": [1, null]}', str(2**70).encode(), "é".encode()]]]
    path = write_mds(tmp_path, {"meta": "json", "id": "str_int", "text": "str"}, [None] * 3, files)
    decode = gdsdata.Fields(decode={"meta": "json", "id": "json", "text": "txt"})
    (batch,) = gdsdata.GDSDataset(path, 1, device="cpu", fields=decode)
    assert batch == {"meta": [{"a": [1, None]}], "id": [2**70], "text": ["é"]}


class TestMosaic:
    """Comparison with MosaicML's own writers."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_reads_what_its_writers_write(self, tmp_path, kind):
        streaming = pytest.importorskip("streaming", exc_type=ImportError)
        writer = getattr(streaming, f"{kind.upper()}Writer")
        columns = {"text": "str", "n": "int", "x": "float"}
        samples = [{"text": "é" * (i % 9), "n": -i, "x": i / 7} for i in range(300)]
        options = {"separator": "||"} if kind == "xsv" else {}
        with writer(
            out=str(tmp_path / "d"), columns=columns, size_limit=4000, compression="zstd", hashes=["sha1"], **options
        ) as out:
            for sample in samples:
                out.write(sample)
        found = read(tmp_path / "d", Mds(unpacked=str(tmp_path / "kept")))
        assert found == {name: [sample[name] for sample in samples] for name in columns}
