"""MDS: the place of each column of each sample, and the errors that refuse a dataset."""

import bz2
import contextlib
import errno
import gzip
import hashlib
import json
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import few_bytes_of_python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_files import (
    Opens,
    assert_within_files,
    edit_json,
    outcomes_of_damage,
    pack_sample,
    pack_shard,
    read_column,
    same,
    set_at,
)

from gdsdata import GDSDataset
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import shards, unpacking
from gdsdata.formats.mds import Mds, decode_array
from gdsdata.storage import heads

# Hypothesis runs one test function many times with one tmp_path. Every example here overwrites its
# files.
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

DTYPE_CODES = {
    8: "u1",
    9: "i1",
    16: "u2",
    17: "i2",
    18: "f2",
    32: "u4",
    33: "i4",
    34: "f4",
    64: "u8",
    65: "i8",
    66: "f8",
}
SCALARS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]


def array_head(array: np.ndarray, with_dtype: bool = True, width: int | None = None) -> bytes:
    """Return the header of an array whose shape its encoding does not state."""
    if width is None:
        width = next(i for i in range(4) if max(array.shape) < 1 << (8 << i))
    (code,) = [code for code, name in DTYPE_CODES.items() if np.dtype(name) == array.dtype]
    axes = np.array(array.shape, f"<u{1 << width}").tobytes()
    return bytes([code] * with_dtype + [array.ndim << 2 | width]) + axes


def pack_array(array: np.ndarray, **options) -> bytes:
    return array_head(array, **options) + array.tobytes()


def write_mds(folder, columns: dict[str, str], sizes: list[int | None], files: list[list[list[bytes]]]) -> str:
    """Write a shard for each of ``files`` (samples, of columns), and return the index.json."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for i, samples in enumerate(files):
        record = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 1 << 26}
        record |= {"column_names": list(columns), "column_encodings": list(columns.values()), "column_sizes": sizes}
        packed = [pack_sample(sample, [size is None for size in sizes]) for sample in samples]
        data = pack_shard(packed, json.dumps(record, sort_keys=True).encode())
        (folder / f"shard.{i:05}.mds").write_bytes(data)
        raw = {"basename": f"shard.{i:05}.mds", "bytes": len(data), "hashes": {}}
        listed.append({**record, "raw_data": raw, "zip_data": None, "samples": len(samples)})
    path = folder / "index.json"
    path.write_text(json.dumps({"version": 2, "shards": listed}))
    return str(path)


def write_plain(folder, samples: int = 5) -> str:
    """Write two shards with two columns of varying size around one of fixed size."""
    files = [[[b"j" * i, np.int64(i).tobytes(), b"text" * i] for i in range(samples)] for _ in range(2)]
    return write_mds(folder, {"image": "jpeg", "label": "int", "text": "str"}, [None, 8, None], files)


def write_arrays(folder, *files: list[np.ndarray]) -> str:
    return write_mds(folder, {"x": "ndarray"}, [None], [[[pack_array(array)] for array in arrays] for arrays in files])


class TestColumns:
    @pytest.mark.parametrize("name", ["int", *SCALARS])
    def test_a_number_is_one_element(self, tmp_path, name):
        dtype = np.dtype("int64" if name == "int" else name)
        values = [np.array(value).astype(dtype) for value in (0, 1, 100, 127)]
        path = write_mds(tmp_path, {"x": name}, [dtype.itemsize], [[[value.tobytes()] for value in values]])
        index = Mds().index([path])
        assert (index.fields[0].dtype, index.fields[0].shape) == (dtype, ())
        assert same(read_column(index, "x"), values)

    @pytest.mark.parametrize(
        "encoding",
        [
            *("bytes", "str", "json", "str_int", "str_float", "str_decimal", "jpeg", "png", "pil"),
            *("jpeg_array", "jpegarray", "list[jpeg]", "list[png]", "list[pil]"),
        ],
    )
    def test_text_and_media_are_their_bytes(self, tmp_path, encoding):
        values = [b"", b"a", b"bc" * 500]
        path = write_mds(tmp_path, {"x": encoding, "y": encoding}, [None, None], [[[v, v[::-1]] for v in values]])
        index = Mds().index([path])
        assert [(field.name, field.dtype, field.shape) for field in index.fields] == [
            ("x", None, None),
            ("y", None, None),
        ]
        assert read_column(index, "x") == values
        assert read_column(index, "y") == [value[::-1] for value in values]

    def test_samples_run_through_the_shards_in_order(self, tmp_path):
        files = [[[b"%d" % (10 * i + j)] for j in range(count)] for i, count in enumerate((3, 0, 4, 1))]
        index = Mds().index([write_mds(tmp_path, {"x": "bytes"}, [None], files)])
        assert index.first_sample.tolist() == [0, 3, 3, 7, 8]
        assert read_column(index, "x") == [sample[0] for samples in files for sample in samples]
        assert read_column(index, "x", [7, 0, 3]) == [b"30", b"0", b"20"]
        assert_within_files(index)

    @pytest.mark.parametrize("empty", [0, 1, 3])
    def test_samples_are_looked_at_side_by_side_if_opens_wait(self, tmp_path, monkeypatch, empty):
        counts = [*[0] * empty, *(i % 4 for i in range(1, 40))]
        files = [
            [[b"%d" % i * j, np.int64(i).tobytes(), b"t" * i] for j in range(count)]
            for i, count in enumerate(counts, 1 - empty)
        ]
        path = write_mds(tmp_path, {"image": "jpeg", "label": "int", "text": "str"}, [None, 8, None], files)
        opens = Opens(monkeypatch, 0.02)
        index = Mds().index([path])
        with_samples = [f"shard.{i:05}.mds" for i, count in enumerate(counts) if count]
        assert sorted(opens.paths) == [str(tmp_path / name) for name in with_samples]
        assert len(opens.threads) > 2, "the first samples are looked at by one thread, and the others by several"
        samples = [sample for samples in files for sample in samples]
        assert read_column(index, "image") == [image for image, _, _ in samples]
        assert read_column(index, "text") == [text for _, _, text in samples]
        assert [int(label) for label in read_column(index, "label")] == [i for i in range(1, 40) for _ in range(i % 4)]

    def test_the_first_of_several_damaged_shards_is_named(self, tmp_path, monkeypatch):
        files = [[[b"image", b"text"] for _ in range(3)] for _ in range(20)]
        path = write_mds(tmp_path, {"image": "jpeg", "text": "str"}, [None, None], files)
        for i in (19, 5, 6):
            shard = tmp_path / f"shard.{i:05}.mds"
            content = bytearray(shard.read_bytes())
            content[content.rindex(b"image") - 4] ^= 1  # of the second column's size
            shard.write_bytes(content)
        Opens(monkeypatch, 0.01)
        with pytest.raises(CorruptData, match=r"shard\.00005\.mds: .* sizes of its columns"):
            Mds().index([path])

    def test_remembers_size_and_time_of_each_shard(self, tmp_path):
        index = Mds().index([write_plain(tmp_path)])
        status = [os.stat(path) for path in index.paths]
        assert index.size_bytes.tolist() == [one.st_size for one in status]
        assert index.mtime_ns.tolist() == [one.st_mtime_ns for one in status]

    def test_tables_of_many_shards_are_read_by_threads_of_the_extension(self, tmp_path, monkeypatch):
        path = write_mds(tmp_path, {"x": "bytes"}, [None], [[[b"%d" % i]] for i in range(300)])
        by_threads, read = [], heads.engine.read_heads

        def counted(joined, count, head_bytes, threads):
            by_threads.extend([head_bytes] * count)
            return read(joined, count, head_bytes, threads)

        monkeypatch.setattr(heads.engine, "read_heads", counted)
        index = Mds().index([path])
        assert read_column(index, "x") == [b"%d" % i for i in range(300)]
        assert by_threads.count(shards.table_size(1)) >= 200

    @pytest.mark.parametrize("most", [1, 40, 100, 10**6])
    def test_tables_in_memory_together_take_no_more_than_their_limit(self, tmp_path, monkeypatch, most):
        files = [[[b"%d" % i]] * count for i, count in enumerate((1, 1, 9, 1, 0, 1, 1, 1))]
        path = write_mds(tmp_path, {"x": "bytes"}, [None], files)
        parts, read = [], shards.read_heads
        monkeypatch.setattr(shards, "_TABLES_AT_ONCE_BYTES", most)
        monkeypatch.setattr(
            shards, "read_heads", lambda paths, size: (parts.append((len(paths), size)), read(paths, size))[1]
        )
        index = Mds().index([path])
        assert read_column(index, "x") == [sample[0] for samples in files for sample in samples]
        assert all(count == 1 or count * size <= most for count, size in parts)
        assert sum(count for count, _ in parts) == 8
        assert len(parts) == {1: 8, 40: 4, 100: 3, 10**6: 1}[most]

    def test_with_one_column_of_varying_size_no_sample_is_read(self, tmp_path, monkeypatch):
        files = [[[b"x" * i, np.int64(i).tobytes()] for i in range(9)]]
        path = write_mds(tmp_path, {"image": "jpeg", "label": "int"}, [None, 8], files)
        monkeypatch.setattr(shards.StretchReader, "read", lambda *_: pytest.fail("reads samples"))
        index = Mds().index([path])
        assert read_column(index, "image") == [b"x" * i for i in range(9)]
        assert same(read_column(index, "label"), np.arange(9))

    @given(st.data())
    @many
    def test_finds_every_column_whatever_the_samples_hold(self, tmp_path, data):
        kinds = data.draw(
            st.lists(st.sampled_from(["bytes", "int32", "ndarray:uint16:2,3", "ndarray"]), min_size=1, max_size=6)
        )
        fixed = {"bytes": None, "int32": 4, "ndarray:uint16:2,3": 12, "ndarray": None}
        arrays = st.integers(1, 300).map(lambda size: pack_array(np.arange(size, dtype="u2")))
        values = {
            "bytes": st.binary(max_size=20),
            "int32": st.binary(min_size=4, max_size=4),
            "ndarray:uint16:2,3": st.binary(min_size=12, max_size=12),
            "ndarray": arrays,
        }
        sample = st.tuples(*(values[kind] for kind in kinds)).map(list)
        files = data.draw(st.lists(st.lists(sample, max_size=5), min_size=1, max_size=3))
        columns = {f"c{i}": kind for i, kind in enumerate(kinds)}
        index = Mds().index([write_mds(tmp_path, columns, [fixed[kind] for kind in kinds], files)])
        assert_within_files(index)
        written = [sample for samples in files for sample in samples]
        assert len(index) == len(written)
        for i, kind in enumerate(kinds):
            expected = [one[i] for one in written]
            if kind == "ndarray":
                expected = [decode_array(one).tobytes() for one in expected]
            got = [one if isinstance(one, bytes) else one.tobytes() for one in read_column(index, f"c{i}")]
            assert got == expected


class TestArrays:
    @pytest.mark.parametrize("dtype", SCALARS)
    def test_an_array_of_declared_shape_has_it(self, tmp_path, dtype):
        values = [np.arange(i, i + 6).reshape(2, 3).astype(dtype) for i in range(4)]
        nbytes = values[0].nbytes
        path = write_mds(tmp_path, {"x": f"ndarray:{dtype}:2, 3"}, [nbytes], [[[v.tobytes()] for v in values]])
        index = Mds().index([path])
        assert index.fields[0].shape == (2, 3)
        assert same(read_column(index, "x"), values)

    @pytest.mark.parametrize("dtype", SCALARS)
    @pytest.mark.parametrize("width", [0, 1, 2, 3])
    @pytest.mark.parametrize("declared", [True, False])
    def test_arrays_of_one_shape_have_it_declared_or_not(self, tmp_path, dtype, width, declared):
        values = [np.arange(i, i + 12).reshape(2, 2, 3).astype(dtype) for i in range(4)]
        files = [[[pack_array(v, with_dtype=not declared, width=width)] for v in values]] * 2
        path = write_mds(tmp_path, {"x": f"ndarray:{dtype}" if declared else "ndarray"}, [None], files)
        index = Mds().index([path])
        assert (index.fields[0].dtype, index.fields[0].shape) == (np.dtype(dtype), (2, 2, 3))
        assert same(read_column(index, "x"), values * 2)

    def test_arrays_of_one_axis_may_vary_in_length(self, tmp_path):
        values = [np.arange(size, dtype="u2") for size in (1, 255, 256, 70_000)]
        index = Mds().index([write_arrays(tmp_path, values[:2], values[2:])])
        assert (index.fields[0].dtype, index.fields[0].shape) == (np.dtype("u2"), None)
        assert same(read_column(index, "x"), values)

    @pytest.mark.parametrize(
        "values",
        [
            [np.zeros((2, 3), "f4"), np.ones((3, 3), "f4")],
            [np.zeros((2, 3), "f4"), np.ones((3, 2), "f4")],
            [np.zeros(6, "f4"), np.ones((3, 2), "f4")],
            [np.zeros(6, "f4"), np.ones(6, "f8")],
        ],
        ids=["one axis varies", "two axes vary", "their number varies", "dtype varies"],
    )
    @pytest.mark.parametrize("apart", [True, False])
    def test_unlike_arrays_are_bytes_that_decode(self, tmp_path, values, apart):
        index = Mds().index([write_arrays(tmp_path, *([[v] for v in values] if apart else [values]))])
        assert (index.fields[0].dtype, index.fields[0].shape) == (None, None)
        assert same([decode_array(data) for data in read_column(index, "x")], values)

    def test_an_array_may_have_many_axes(self, tmp_path):
        values = [np.arange(4, dtype="u1").reshape([1] * 40 + [4])[(0,) * 10] for _ in range(2)]  # 31 axes
        files = [[[pack_array(value, width=3)] for value in values]]  # a head of 250 bytes
        index = Mds().index([write_mds(tmp_path, {"x": "ndarray"}, [None], files)])
        assert index.fields[0].shape == values[0].shape
        assert same(read_column(index, "x"), values)

    @given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.sampled_from(SCALARS))
    @many
    def test_decodes_what_was_packed(self, shape, dtype):
        array = (np.arange(min(np.prod(shape), 10**4)) % 100).astype(dtype)
        array = np.resize(array, shape) if np.prod(shape) <= 10**4 else array
        assert same(
            [decode_array(pack_array(array)), decode_array(pack_array(array, with_dtype=False), f"ndarray:{dtype}")],
            [array] * 2,
        )

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "ends within its head"),
            (b"\x08", "ends within its head"),
            (bytes([7, 4, 1, 0]), "dtype is not known"),
            (bytes([8, 8, 1]), "ends within its head"),
            (bytes([8, 4, 2, 0]), "shape does not fit its length"),
            (bytes([8, 4, 1, 0, 0]), "shape does not fit its length"),
            (bytes([34, 4, 1, 0, 0]), "shape does not fit its length"),
            (bytes([8, 63 << 2 | 3]) + b"\xff" * 504, "shape does not fit its length"),
            (bytes([8, 3 << 2 | 2]) + np.array([1 << 31, 1 << 31, 4], "<u4").tobytes(), "does not fit its length"),
            (bytes([8, 2 << 2 | 3]) + (1 << 32).to_bytes(8, "little") * 2, "shape does not fit its length"),
        ],
    )
    def test_a_lying_head_is_corrupt(self, tmp_path, data, message):
        with pytest.raises(CorruptData, match=message):
            decode_array(data)
        path = write_mds(tmp_path, {"x": "ndarray"}, [None], [[[pack_array(np.zeros(3, "u1"))], [data]]])
        with pytest.raises(
            CorruptData, match=f"shard.00000.mds: damaged at bytes [0-9]+ to [0-9]+: .*{message}"
        ) as caught:
            Mds().index([path])
        assert caught.value.length == len(data)


class TestIndexJson:
    def test_a_folders_files_will_do(self, tmp_path):
        write_plain(tmp_path)
        (tmp_path / "README").write_text("not a shard")
        assert len(Mds().index(sorted(str(path) for path in tmp_path.iterdir()))) == 10

    def test_shards_may_lie_in_folders_below(self, tmp_path):
        write_plain(tmp_path / "part")
        (tmp_path / "part/index.json").rename(tmp_path / "index.json")
        for i in range(2):
            edit_json(tmp_path / "index.json", set_at(["shards", i, "raw_data", "basename"], f"part/shard.{i:05}.mds"))
        assert Mds().index([str(tmp_path / "index.json")]).paths[1] == str(tmp_path / "part/shard.00001.mds")

    def test_two_datasets_follow_each_other(self, tmp_path):
        paths = [write_plain(tmp_path / name, samples) for name, samples in (("a", 2), ("b", 3))]
        index = Mds().index(paths)
        assert read_column(index, "text") == [b"text" * i for i in (0, 1, 0, 1, 0, 1, 2, 0, 1, 2)]

    def test_columns_of_shards_that_are_left_out_do_not_count(self, tmp_path):
        path = write_mds(tmp_path, {"a": "int"}, [8], [[[bytes(8)]], [[bytes(8)]], [[bytes(8)]]])
        edit_json(tmp_path / "index.json", set_at(["shards", 0, "column_names"], ["b"]))
        edit_json(tmp_path / "index.json", set_at(["shards", 1, "column_encodings"], ["strange"]))
        index = Mds(without=tuple(str(tmp_path / f"shard.0000{i}.mds") for i in (0, 1))).index([path])
        assert index.field_names == ("a",) and len(index) == 1

    def test_without_an_index_json_says_what_to_pass(self, tmp_path):
        write_plain(tmp_path)
        with pytest.raises(
            ValueError, match="none of the 1 files such as .*shard.00000.mds is called index.json.*folder"
        ):
            Mds().index([str(tmp_path / "shard.00000.mds")])

    def test_pickles_are_refused_unless_their_bytes_are_asked_for(self, tmp_path):
        path = write_mds(tmp_path, {"x": "pkl"}, [None], [[[b"cos\nsystem\n"]]])
        with pytest.raises(ValueError, match="column 'x' holds pickles, which may run any code.*allow_pickle=True"):
            Mds().index([path])
        assert read_column(Mds(allow_pickle=True).index([path]), "x") == [b"cos\nsystem\n"]

    def test_shards_of_unlike_columns_are_refused(self, tmp_path):
        path = write_plain(tmp_path)
        edit_json(tmp_path / "index.json", set_at(["shards", 1, "column_encodings", 0], "png"))
        with pytest.raises(ValueError, match="shard.00000.mds has the columns .*shard.00001.mds .*separate datasets"):
            Mds().index([path])

    @pytest.mark.parametrize(
        "name", ["/etc/passwd", "../shard.00000.mds", "a/../../b", "..", "", "a\0b", "\ud800", None, 7, ["a"]]
    )
    def test_a_shard_outside_the_folder_is_refused(self, tmp_path, name):
        path = write_plain(tmp_path)
        edit_json(tmp_path / "index.json", set_at(["shards", 0, "raw_data", "basename"], name))
        with pytest.raises(
            CorruptData, match="no path below this folder|a shard's name is .* not of type str"
        ) as caught:
            Mds().index([path])
        assert caught.value.path == path

    @pytest.mark.parametrize(
        ("way", "value", "message"),
        [
            (["version"], 1, "version 1 of MDS"),
            (["version"], 9, "version 9 of MDS"),
            (["shards", 1, "version"], 9, "lists a shard of version 9 of MDS: write it with version 2"),
            (["shards", 0, "version"], ..., "version is None, not of type int"),
            (["version"], ..., "version is None, not of type int"),
            (["shards"], {}, "shards is {}, not of type list"),
            (["shards"], [], "index.json': no shards are listed"),
            (["shards", 0], [], r"a shard is \[\], not of type dict"),
            (["shards", 0, "format"], "orc", "shards of format 'orc': write the dataset with a writer of"),
            (["shards", 0, "raw_data"], None, "raw_data is None, not of type dict"),
            (["shards", 0, "raw_data", "bytes"], "9", "bytes is '9', not of type int"),
            (["shards", 0, "raw_data", "bytes"], 2**40, "bytes is 1099511627776, not in 0 to 4294967295"),
            (["shards", 0, "raw_data", "bytes"], 7, "index.json says 7 bytes, and it has [0-9]+"),
            (["shards", 0, "samples"], True, "samples is True, not of type int"),
            (["shards", 0, "samples"], 5.0, "samples is 5.0, not of type int"),
            (["shards", 0, "samples"], -1, "samples is -1, not in 0 to"),
            (["shards", 0, "samples"], 10**9, "index.json says 1000000000 samples, which take more than the"),
            (["shards", 0, "samples"], 4, "it says that it holds 5 samples, and index.json 4"),
            (["shards", 0, "zip_data"], 1, "zip_data is 1, not of type dict or NoneType"),
            (["shards", 0, "column_names"], ["a", "a", "b"], r"3 column_names \(2 different ones\)"),
            (["shards", 0, "column_names"], ["a", "b"], "2 column_names .*3 column_encodings"),
            (["shards", 0, "column_names", 0], 1, "one of column_names is 1, not of type str"),
            (["shards", 0, "column_sizes", 0], "8", "one of column_sizes is '8', not of type int or NoneType"),
            (
                ["shards", 0, "column_sizes", 0],
                8,
                "column 'image' has a size of 8 bytes, and its encoding 'jpeg' has None",
            ),
            (["shards", 0, "column_sizes", 1], 4, "column 'label' has a size of 4 bytes, and its encoding 'int' has 8"),
            (
                ["shards", 0, "column_encodings", 0],
                "webp",
                "has the encoding 'webp'; what can be read is bytes, .*uint8",
            ),
            (["shards", 0, "column_encodings", 0], "ndarray:float128", "there is no encoding 'ndarray:float128'"),
            (["shards", 0, "column_encodings", 0], "ndarray:int8:2:3", "there is no encoding 'ndarray:int8:2:3'"),
            (["shards", 0, "column_encodings", 0], "ndarray:int8:0", "there is no encoding 'ndarray:int8:0'"),
            (["shards", 0, "column_encodings", 0], "ndarray:int8:-1,2", "there is no encoding 'ndarray:int8:-1,2'"),
        ],
    )
    def test_a_wrong_index_json_says_what_is_wrong(self, tmp_path, way, value, message):
        path = write_plain(tmp_path)
        edit_json(tmp_path / "index.json", set_at(way, value))
        with pytest.raises(ValueError, match=message):
            Mds().index([path])

    @pytest.mark.parametrize("text", ["", "{", "[]", "7", "\xff", '{"version": 2', "[" * 10**6, "9" * 5000])
    def test_no_json_is_corrupt(self, tmp_path, text):
        path = write_plain(tmp_path)
        (tmp_path / "index.json").write_bytes(text.encode("latin1"))
        with pytest.raises(CorruptData, match="index.json is no JSON|it is .*, not of type dict"):
            Mds().index([path])

    def test_a_shard_listed_twice_is_corrupt(self, tmp_path):
        path = write_plain(tmp_path)
        edit_json(tmp_path / "index.json", lambda content: content["shards"].append(content["shards"][0]))
        with pytest.raises(CorruptData, match="is listed twice") as caught:
            Mds().index([path])
        assert caught.value.path == str(tmp_path / "shard.00000.mds")

    def test_a_missing_shard_is_named(self, tmp_path):
        path = write_plain(tmp_path)
        (tmp_path / "shard.00001.mds").unlink()
        said = rf"{path} lists it: fetch this shard.*shard.00001.mds"
        with pytest.raises(FileNotFoundError, match=said) as caught:
            Mds().index([path])
        assert caught.value.filename == str(tmp_path / "shard.00001.mds")


class TestDamage:
    def test_a_file_cut_anywhere_is_corrupt(self, tmp_path):
        path = write_plain(tmp_path)
        shard = tmp_path / "shard.00000.mds"
        whole = shard.read_bytes()
        for size in range(len(whole)):
            shard.write_bytes(whole[:size])
            with pytest.raises(CorruptData, match=f"index.json says {len(whole)} bytes, and it has {size}"):
                Mds().index([path])

    @pytest.mark.parametrize(
        ("place", "value", "message", "offset"),
        [
            (0, 4, "it says that it holds 4 samples, and index.json 5", 0),
            (1, 27, "first sample would start within the table, at 27", 4),
            (2, 2**32 - 1, "sample 1 would start at 4294967295 and end before, at ", 8),
            (2, 1, "sample 0 would start at [0-9]+ and end before, at 1", 4),
            (6, 340, "last sample would end at 340, and the file ends at", 24),
            (6, 2**32 - 1, "last sample would end at 4294967295, and the file ends at", 24),
        ],
    )
    def test_a_lying_table_is_corrupt(self, tmp_path, place, value, message, offset):
        path = write_plain(tmp_path)
        shard = tmp_path / "shard.00000.mds"
        words = bytearray(shard.read_bytes())
        words[4 * place : 4 * place + 4] = value.to_bytes(4, "little")
        shard.write_bytes(words)
        with pytest.raises(CorruptData, match=message) as caught:
            Mds().index([path])
        assert (caught.value.path, caught.value.offset) == (str(shard), offset)

    @pytest.mark.parametrize("sizes", [(0, 0), (1, 5), (2**32 - 1, 6), (2**32 - 1, 2**32 - 1)])
    def test_sizes_that_do_not_make_up_their_sample_are_corrupt(self, tmp_path, sizes):
        path = write_plain(tmp_path)
        shard = tmp_path / "shard.00000.mds"
        begin = int(np.frombuffer(shard.read_bytes(), "<u4", 1, 8)[0])
        data = bytearray(shard.read_bytes())
        data[begin : begin + 8] = np.array(sizes, "<u4").tobytes()
        shard.write_bytes(data)
        with pytest.raises(CorruptData, match="the sizes of its columns do not make up the sample") as caught:
            Mds().index([path])
        assert (caught.value.path, caught.value.offset, caught.value.length) == (str(shard), begin, 8 + 8 + 1 + 4)

    def test_a_sample_shorter_than_its_columns_of_fixed_size_is_corrupt(self, tmp_path):
        path = write_mds(tmp_path, {"a": "int", "b": "bytes"}, [8, None], [[[bytes(8), b"xyz"], [bytes(2), b""]]])
        with pytest.raises(CorruptData, match="the sample is too short for its columns of fixed size"):
            Mds().index([path])

    def test_absurd_counts_are_refused_before_memory_is_taken(self, tmp_path):
        path = write_plain(tmp_path)
        shard = tmp_path / "shard.00000.mds"
        with open(shard, "r+b") as file:
            file.write((2**32 - 3).to_bytes(4, "little"))
        edit_json(tmp_path / "index.json", set_at(["shards", 0, "samples"], 2**32 - 3))
        with few_bytes_of_python(2**20), pytest.raises(CorruptData, match="which take more than the"):
            Mds().index([path])

    @pytest.mark.parametrize("name", ["shard.00000.mds", "index.json"])
    @pytest.mark.parametrize("seed", range(4))
    def test_no_damage_makes_an_extent_leave_its_file(self, tmp_path, name, seed):
        files = [[[b"j" * i, pack_array(np.zeros((2, i + 1), "f4")), b"1234"] for i in range(4)]] * 2
        path = write_mds(tmp_path, {"a": "jpeg", "b": "ndarray", "c": "int32"}, [None, None, 4], files)
        outcomes = outcomes_of_damage(
            tmp_path / name, seed, ["shards", 0, "raw_data", "bytes"], lambda: Mds().index([path])
        )
        assert {"read", "CorruptData"} <= outcomes


def pack_shards(folder, compression: str) -> str:
    """Compress the dataset's shards as streaming's writer does, and return the index.json."""
    pyarrow = pytest.importorskip("pyarrow") if compression in ("br", "snappy") else None
    pack = {
        "zstd": lambda data: pytest.importorskip("zstandard").ZstdCompressor(3).compress(data),
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "br": lambda data: pyarrow.compress(data, "brotli", asbytes=True),
        "snappy": lambda data: pyarrow.compress(data, "snappy", asbytes=True),
    }.get(compression.split(":")[0], bytes)

    def change(content):
        for record in content["shards"]:
            raw = folder / record["raw_data"]["basename"]
            packed = raw.with_name(f"{raw.name}.{compression.split(':')[0]}")
            packed.write_bytes(pack(raw.read_bytes()))
            raw.unlink()
            record["compression"] = compression
            record["zip_data"] = {"basename": packed.name, "bytes": packed.stat().st_size, "hashes": {}}

    edit_json(folder / "index.json", change)
    return str(folder / "index.json")


def _damaged_for_nothing_to_notice(packed: bytes, zstandard: Any) -> bytes:
    """Change a bit of a frame so that it unpacks to other bytes of the same number."""
    whole = zstandard.ZstdDecompressor().decompress(packed)
    for at in reversed(range(len(packed))):
        changed = packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]
        with contextlib.suppress(zstandard.ZstdError):
            found = zstandard.ZstdDecompressor().decompress(changed)
            if len(found) == len(whole) and found != whole:
                return changed
    raise AssertionError("zstd notices everything")


@pytest.mark.filterwarnings("ignore:gdsdata. .* compressed shards were unpacked")
class TestCompressed:
    """Shards that are compressed as a whole are unpacked once."""

    @pytest.fixture
    def data(self, tmp_path):
        (tmp_path / "data").mkdir()
        write_plain(tmp_path / "data")
        return tmp_path / "data"

    def expected(self, samples: int = 5) -> list[bytes]:
        return [b"text" * i for i in range(samples)] * 2

    @pytest.mark.parametrize("compression", ["zstd", "zstd:7", "gz:9", "bz2", "br", "snappy"])
    def test_samples_are_those_of_the_shards_before(self, data, tmp_path, compression):
        index = Mds(unpacked=str(tmp_path / "kept")).index([pack_shards(data, compression)])
        assert read_column(index, "text") == self.expected()
        assert_within_files(index)
        assert {os.path.dirname(path) for path in index.paths} == {str(tmp_path / "kept")}
        assert len(os.listdir(tmp_path / "kept")) == 2

    def test_a_missing_compressed_shard_is_named_with_the_index_that_lists_it(self, data, tmp_path):
        source = pack_shards(data, "gz")
        (data / "shard.00001.mds.gz").unlink()
        with pytest.raises(FileNotFoundError, match=rf"{source} lists it: fetch this shard.*shard.00001.mds.gz"):
            Mds(unpacked=str(tmp_path / "kept")).index([source])

    @pytest.mark.parametrize("algorithm", ["sha1", "sha256", "blake2b"])
    def test_damage_that_zstd_does_not_notice_is_found_by_the_hash(self, data, tmp_path, algorithm):
        zstandard = pytest.importorskip("zstandard")
        hashed = {path.name: hashlib.new(algorithm, path.read_bytes()).hexdigest() for path in data.glob("*.mds")}
        source = pack_shards(data, "zstd")
        for i, name in enumerate(sorted(hashed)):
            said = {algorithm: hashed[name].upper()}
            edit_json(data / "index.json", set_at(["shards", i, "raw_data", "hashes"], said))
        kept = Mds(unpacked=str(tmp_path / "kept"))
        assert read_column(kept.index([source]), "text") == self.expected()
        shard = data / "shard.00001.mds.zstd"
        shard.write_bytes(_damaged_for_nothing_to_notice(shard.read_bytes(), zstandard))
        with pytest.raises(CorruptData, match=rf"its {algorithm} is .*, and index.json says .*write") as caught:
            kept.index([source])
        assert caught.value.path == str(shard)
        assert len(os.listdir(tmp_path / "kept")) == 2, "wrongly unpacked shards are left"

    def test_a_hash_that_cannot_be_computed_here_is_passed_over(self, data, tmp_path):
        source = pack_shards(data, "gz")
        said = {"shake_128": "1", "sys": "2", "xxh9": "", "sha1\ud800": "3"}
        edit_json(data / "index.json", set_at(["shards", 0, "raw_data", "hashes"], said))
        assert read_column(Mds(unpacked=str(tmp_path / "kept")).index([source]), "text") == self.expected()

    @pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0"])
    def test_a_compressed_shard_of_another_size_is_corrupt(self, data, tmp_path, change):
        """A truncated checksum goes unnoticed by every decoder."""
        zstandard = pytest.importorskip("zstandard")
        source = pack_shards(data, "zstd")
        shard = data / "shard.00000.mds.zstd"
        raw = zstandard.ZstdDecompressor().decompress(shard.read_bytes())
        shard.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(raw))
        edit_json(data / "index.json", set_at(["shards", 0, "zip_data", "bytes"], shard.stat().st_size))
        shard.write_bytes(change(shard.read_bytes()))
        with pytest.raises(CorruptData, match=r"index.json says [0-9]+ bytes, and it has [0-9]+") as caught:
            Mds(unpacked=str(tmp_path / "kept")).index([source])
        assert caught.value.path == str(shard)

    @pytest.mark.parametrize("where", ["user", "beside"])
    def test_they_are_kept_where_they_are_asked_for(self, data, tmp_path, monkeypatch, where):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        source = pack_shards(data, "gz")
        index = Mds(unpacked=where).index([source])
        folder = tmp_path / "cache/gdsdata/mds" if where == "user" else data
        assert {os.path.dirname(path) for path in index.paths} == {str(folder)}
        if where == "beside":  # hidden files, so that the folder is the same data as before
            (batch,) = GDSDataset(data, 10, Mds(unpacked=where), shuffle=False, device="cpu")
            assert [bytes(one.numpy()) for one in batch["text"].as_list()] == self.expected()

    def test_the_folder_of_unpacked_shards_is_a_warning_once(self, data, tmp_path):
        source = pack_shards(data, "gz")
        said = rf"2 compressed shards were unpacked into {tmp_path}/kept, where .* GB"
        with pytest.warns(RuntimeWarning, match=said):
            Mds(unpacked=str(tmp_path / "kept")).index([source])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Mds(unpacked=str(tmp_path / "kept")).index([source])

    def test_a_shard_is_unpacked_anew_when_its_file_has_changed_and_only_then(self, data, tmp_path):
        kept = Mds(unpacked=str(tmp_path / "kept"))
        source = pack_shards(data, "gz")
        before = [os.stat(path).st_ino for path in kept.index([source]).paths]
        assert [os.stat(path).st_ino for path in kept.index([source]).paths] == before
        shard = data / "shard.00001.mds.gz"
        os.utime(shard, ns=(1, 1))
        after = [os.stat(path).st_ino for path in kept.index([source]).paths]
        assert after[0] == before[0] and after[1] != before[1]
        assert len(os.listdir(tmp_path / "kept")) == 2  # the earlier file's unpacked data was removed

    def test_unpacked_shards_beside_the_packed_ones_are_read(self, data):
        whole = (data / "shard.00000.mds").read_bytes()
        source = pack_shards(data, "lz4")
        with pytest.raises(ValueError, match=r"compressed as a whole \(lz4\).*only zstd, gz, bz2, br, snappy are"):
            Mds().index([source])
        for i in range(2):
            (data / f"shard.{i:05}.mds").write_bytes(whole)
        assert read_column(Mds().index([source]), "text") == self.expected()

    def test_none_refuses_them_with_what_unpacks_them(self, data):
        source = pack_shards(data, "zstd:7")
        command = rf"zstd -d {data}/shard.00000.mds.zstd -o {data}/shard.00000.mds"
        with pytest.raises(ValueError, match=rf"compressed as a whole \(zstd:7\).*unpacked=None.*\({command}\)"):
            Mds(unpacked=None).index([source])

    @pytest.mark.parametrize("compression", ["zstd", "gz", "bz2", "br", "snappy"])
    def test_a_damaged_or_short_file_is_corrupt_and_leaves_nothing(self, data, tmp_path, compression):
        source = pack_shards(data, compression)
        shard = data / f"shard.00001.mds.{compression}"
        whole = shard.read_bytes()
        for damaged in (whole[: len(whole) // 2], whole[:-1], b"", b"xx" + whole, whole + whole):
            shard.write_bytes(damaged)
            with pytest.raises(CorruptData) as caught:
                Mds(unpacked=str(tmp_path / "kept")).index([source])
            assert caught.value.path == str(shard) and caught.value.length == len(damaged)
            assert len(os.listdir(tmp_path / "kept")) <= 1  # the other shard

    @pytest.mark.parametrize("compression", ["zstd", "gz"])
    def test_a_bomb_stops_at_the_size_that_was_said(self, data, tmp_path, compression):
        (data / "shard.00000.mds").write_bytes(bytes(64 << 20))
        source = pack_shards(data, compression)
        error = r"unpacked it has more than the \d+ bytes that index.json says"
        with few_bytes_of_python(8 << 20), pytest.raises(CorruptData, match=error):
            Mds(unpacked=str(tmp_path / "kept")).index([source])
        assert not any("tmp" in name for name in os.listdir(tmp_path / "kept"))

    def test_a_size_that_no_disk_has_is_refused_before_the_first_byte(self, data, tmp_path, monkeypatch):
        source = pack_shards(data, "gz")
        monkeypatch.setattr(unpacking.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
        with pytest.raises(IoError, match=r"take .* GB when unpacked, and .*/kept has 1e-07 GB free") as caught:
            Mds(unpacked=str(tmp_path / "kept")).index([source])
        assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path / "kept") == []

    def test_a_folder_that_cannot_be_made_is_an_error(self, data, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(IoError, match="cannot be unpacked into .*; choose another with unpacked="):
            Mds(unpacked=str(tmp_path / "file")).index([pack_shards(data, "gz")])

    @pytest.mark.parametrize("name", ["/etc/passwd", "../shard.00000.mds.gz", "", None])
    def test_a_compressed_shard_outside_the_folder_is_refused(self, data, name):
        source = pack_shards(data, "gz")
        edit_json(data / "index.json", set_at(["shards", 0, "zip_data", "basename"], name))
        with pytest.raises(CorruptData, match="no path below this folder|a shard's name is None"):
            Mds().index([source])

    def test_old_leftovers_of_a_killed_process_are_removed(self, data, tmp_path):
        source, kept = pack_shards(data, "gz"), tmp_path / "kept"
        (shard, _) = Mds(unpacked=str(kept)).index([source]).paths
        left = [kept / f"{os.path.basename(shard)}.{name}.tmp" for name in ("old", "new")]
        for path in (*left, kept / "another file"):
            path.touch()
        os.utime(left[0], (0, 0))
        os.unlink(shard)
        Mds(unpacked=str(kept)).index([source])
        assert not left[0].exists() and left[1].exists() and (kept / "another file").exists()

    def test_a_missing_package_is_an_error_with_its_extra(self, data, monkeypatch):
        source = pack_shards(data, "zstd")
        for name in ("zstandard", "compression"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=r"pip install 'gdsdata\[zstd\]'"):
            Mds().index([source])

    def test_a_shard_is_unpacked_by_one_of_many_at_once(self, data, tmp_path, monkeypatch):
        source = pack_shards(data, "gz")
        copied = []
        copy = unpacking._copy
        monkeypatch.setattr(unpacking, "_copy", lambda *given: (copied.append(given[2].path), copy(*given)))
        with ThreadPoolExecutor(8) as threads:
            indexes = list(threads.map(lambda _: Mds(unpacked=str(tmp_path / "kept")).index([source]), range(8)))
        assert all(read_column(index, "text") == self.expected() for index in indexes)
        assert sorted(copied) == sorted(set(copied))


class TestMosaic:
    """Comparison with MosaicML's own writer."""

    @pytest.fixture
    def write(self, tmp_path):
        streaming = pytest.importorskip("streaming", exc_type=ImportError)

        def write(columns, samples, **options) -> str:
            with streaming.MDSWriter(
                out=str(tmp_path / "out"), columns=columns, size_limit=1 << 14, **options
            ) as writer:
                for sample in samples:
                    writer.write(sample)
            return str(tmp_path / "out/index.json")

        return write

    def test_reads_what_its_writer_writes(self, write):
        columns = dict(b="bytes", s="str", i="int", f="float32", j="json", fixed="ndarray:int16:3,4")
        columns |= dict(same="ndarray", typed="ndarray:float32", ragged="ndarray", unlike="ndarray")
        samples = [
            dict(
                b=b"b" * (7 * i % 50),
                s="é" * (i % 7),
                i=-i,
                f=np.float32(i),
                j={"a": [i]},
                fixed=np.full((3, 4), i, "i2"),
                same=np.full((2, 3), i, "i8"),
                typed=np.full((4, 30), i, "f4"),
                ragged=np.arange(i + 1, dtype="u2"),
                unlike=np.full((2, 1 + i % 3), i, "f8"),
            )
            for i in range(100)
        ]
        index = Mds().index([write(columns, samples)])
        assert len(index) == 100 and len(index.paths) > 3
        for name in ("fixed", "same", "typed", "ragged", "i", "f"):
            assert same(read_column(index, name), [sample[name] for sample in samples]), name
        assert read_column(index, "b") == [sample["b"] for sample in samples]
        assert [data.decode() for data in read_column(index, "s")] == [sample["s"] for sample in samples]
        assert [json.loads(data) for data in read_column(index, "j")] == [sample["j"] for sample in samples]
        assert same(list(map(decode_array, read_column(index, "unlike"))), [sample["unlike"] for sample in samples])

    @pytest.mark.filterwarnings("ignore:gdsdata. .* compressed shards were unpacked")
    @pytest.mark.parametrize("compression", ["zstd", "zstd:3", "gz", "bz2:1", "br", "br:4", "snappy"])
    def test_its_compressed_shards_are_read(self, write, tmp_path, compression):
        path = write({"a": "int"}, [{"a": i} for i in range(5000)], compression=compression)
        index = Mds(unpacked=str(tmp_path / "kept")).index([path])
        assert len(index.paths) > 1 and read_column(index, "a") == list(range(5000))


def test_a_data_set_of_the_index_alone_or_of_its_folder_gives_the_arrays(tmp_path):
    arrays = [np.arange(12, dtype="<f4").reshape(2, 3, 2) + 100 * file for file in range(3)]
    index = write_arrays(tmp_path, *arrays)
    (field,) = Mds().index([index]).fields
    for source in (index, tmp_path):
        batches = list(GDSDataset(source, 4, device="cpu", shuffle=False))
        assert np.array_equal(np.concatenate([batch[field.name].numpy() for batch in batches]), np.concatenate(arrays))
