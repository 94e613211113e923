"""LitData: the place of each leaf of each sample, and the errors that refuse a dataset."""

import json
import os

import numpy as np
import pytest
import torch
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
from torch.utils import _pytree as pytree

from gdsdata.errors import CorruptData
from gdsdata.formats import shards
from gdsdata.formats.litdata import LitData, decode_array

# Hypothesis runs one test function many times with one tmp_path. Every example here overwrites its
# files.
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

TORCH_CODES = {1: "f4", 3: "f8", 5: "c8", 7: "c16", 9: "f2", 11: "u1", 12: "i1", 14: "i2", 16: "i4", 18: "i8", 19: "?"}
NUMPY_CODES = dict(enumerate(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]))


# One key of two million characters, above leaves that would all have it in their names.
_LEAF = {"type": None, "children_spec": []}
_LIST = {"type": "builtins.list", "children_spec": [_LEAF] * 1000}
_DICT = {"type": "builtins.dict", "context": json.dumps(["k" * 1_999_998]), "children_spec": [_LIST]}
LONG_NAMES = json.dumps([1, _DICT])


def pack_array(array: np.ndarray, kind: str = "numpy", order: str = "<") -> bytes:
    codes = NUMPY_CODES if kind == "numpy" else TORCH_CODES
    (code,) = [code for code, name in codes.items() if np.dtype(name) == array.dtype]
    return np.array([code, array.ndim, *array.shape], f"{order}u4").tobytes() + array.tobytes()


def write_index(folder, files: list[bytes], counts: list[int], tree, formats: list[str], **config) -> str:
    """Write shards of these bytes and numbers of items, and their index.json.

    ``tree`` has the structure of a sample.
    """
    chunks = []
    for i, (data, count) in enumerate(zip(files, counts, strict=True)):
        (folder / f"chunk-0-{i}.bin").write_bytes(data)
        chunks.append({"chunk_bytes": len(data), "chunk_size": count, "filename": f"chunk-0-{i}.bin", "dim": None})
    config = {
        "chunk_bytes": 1 << 26,
        "chunk_size": None,
        "compression": None,
        "data_format": formats,
        "data_spec": pytree.treespec_dumps(pytree.tree_flatten(tree)[1]),
        "encryption": None,
        "item_loader": "PyTreeLoader",
        **config,
    }
    path = folder / "index.json"
    path.write_text(json.dumps({"chunks": chunks, "config": config, "updated_at": "1"}))
    return str(path)


def write(folder, tree, formats: list[str], files: list[list[list[bytes]]], **config) -> str:
    """Write a shard for each of ``files`` (samples, of leaves), and return the index.json."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = [pack_shard([pack_sample(sample, [True] * len(sample)) for sample in samples]) for samples in files]
    return write_index(folder, packed, list(map(len, files)), tree, formats, **config)


def write_plain(folder, samples: int = 5) -> str:
    """Write an image, a label and a text for each sample, in two shards."""
    files = [[[b"j" * i, np.int64(i).tobytes(), b"text" * i] for i in range(samples)] for _ in range(2)]
    return write(folder, {"image": 0, "label": 0, "text": 0}, ["jpeg", "int", "str"], files)


def write_tokens(folder, counts: list[list[int]], dtype: str = "tensor:16", **config) -> str:
    """Write running int32 tokens, with ``counts`` of them in each item of each shard."""
    files, start = [], 0
    for items in counts:
        arrays = [np.arange(start := start + count, dtype="<i4")[-count:] for count in items]
        files.append(pack_shard([array.tobytes() for array in arrays]))
    config = {"item_loader": "TokensLoader", **config}
    path = write_index(folder, files, list(map(len, counts)), 0, [f"no_header_{dtype}"], **config)
    for i, items in enumerate(counts):
        edit_json(folder / "index.json", set_at(["chunks", i, "dim"], sum(items)))
    return path


class TestLeaves:
    @pytest.mark.parametrize(("name", "dtype"), [("int", "i8"), ("float", "f8"), ("bool", "?")])
    def test_a_number_is_one_element(self, tmp_path, name, dtype):
        values = np.array([0, 1, 1, 0], dtype)
        index = LitData().index([write(tmp_path, 0, [name], [[[value.tobytes()] for value in values]])])
        assert (index.fields[0].dtype, index.fields[0].shape) == (np.dtype(dtype), ())
        assert same(read_column(index, "0"), values)

    @pytest.mark.parametrize("format", ["str", "bytes", "jpeg", "pil", "jpeg_array", "tif", "video:mp4", "my_own"])
    def test_text_media_and_own_serializers_are_their_bytes(self, tmp_path, format):
        values = [b"", b"a", b"bc" * 500]
        own = ("my_own", "other")
        path = write(tmp_path, (0, 0), [format] * 2, [[[v, v[::-1]] for v in values]])
        index = LitData(serializers=own).index([path])
        assert (index.fields[0].dtype, index.fields[0].shape) == (None, None)
        assert read_column(index, "0") == values
        assert read_column(index, "1") == [value[::-1] for value in values]

    def test_leaves_are_called_by_the_way_to_them(self, tmp_path):
        tree = {"b": 0, "a": [0, (0, {"c": 0})], 7: 0}
        index = LitData().index([write(tmp_path, tree, ["bytes"] * 5, [[[b"0", b"1", b"2", b"3", b"4"]]])])
        assert [field.name for field in index.fields] == ["b", "a.0", "a.1.0", "a.1.1.c", "7"]
        assert [read_column(index, field.name) for field in index.fields] == [[b"%d" % i] for i in range(5)]

    def test_leaves_without_a_tree_are_called_by_their_places(self, tmp_path):
        index = LitData().index([write(tmp_path, 0, ["bytes"] * 2, [[[b"x", b"y"]]], data_spec=None)])
        assert [field.name for field in index.fields] == ["0", "1"]

    def test_with_one_leaf_of_varying_size_no_sample_is_read(self, tmp_path, monkeypatch):
        files = [[[b"x" * i, np.int64(i).tobytes()] for i in range(9)]]
        path = write(tmp_path, {"image": 0, "label": 0}, ["jpeg", "int"], files)
        monkeypatch.setattr(shards.StretchReader, "read", lambda *_: pytest.fail("reads samples"))
        index = LitData().index([path])
        assert read_column(index, "image") == [b"x" * i for i in range(9)]
        assert same(read_column(index, "label"), np.arange(9))

    def test_tensors_are_looked_at_side_by_side_if_opens_wait(self, tmp_path, monkeypatch):
        arrays = [[np.full((i + 1, 2), i, "<f4")] * 3 for i in range(20)]
        files = [[[pack_array(array, "numpy"), b"t" * i] for array in some] for i, some in enumerate(arrays)]
        path = write(tmp_path, {"x": 0, "text": 0}, ["numpy", "str"], files)
        opens = Opens(monkeypatch, 0.02)
        index = LitData().index([path])
        assert len(opens.paths) == len(set(opens.paths)) == 20 and len(opens.threads) > 2
        assert read_column(index, "text") == [b"t" * i for i in range(20) for _ in range(3)]
        values = [decode_array(value, "numpy") for value in read_column(index, "x")]
        assert same(values, [array for some in arrays for array in some])

    @given(st.data())
    @many
    def test_finds_every_leaf_whatever_the_samples_hold(self, tmp_path, data):
        values = {"bytes": st.binary(max_size=20), "float": st.binary(min_size=8, max_size=8)}
        values["no_header_numpy:5"] = st.binary(max_size=9).map(lambda value: value * 2)
        kinds = data.draw(st.lists(st.sampled_from(list(values)), min_size=1, max_size=6))
        sample = st.tuples(*(values[kind] for kind in kinds)).map(list)
        files = data.draw(st.lists(st.lists(sample, max_size=5), min_size=1, max_size=3))
        index = LitData().index([write(tmp_path, [0] * len(kinds), kinds, files)])
        assert_within_files(index)
        written = [sample for samples in files for sample in samples]
        for i in range(len(kinds)):
            got = [one if isinstance(one, bytes) else one.tobytes() for one in read_column(index, str(i))]
            assert got == [one[i] for one in written]


class TestArrays:
    @pytest.mark.parametrize(("code", "dtype"), NUMPY_CODES.items())
    @pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 1, 3, 1, 1, 1, 1, 1)])
    def test_arrays_of_one_shape_have_it(self, tmp_path, code, dtype, shape):
        values = [np.arange(i, i + 6).reshape(shape).astype(dtype) for i in range(4)]
        index = LitData().index([write(tmp_path, 0, ["numpy"], [[[pack_array(value)] for value in values]] * 2)])
        assert (index.fields[0].dtype, index.fields[0].shape) == (np.dtype(dtype), shape)
        assert same(read_column(index, "0"), values * 2)

    @pytest.mark.parametrize(("code", "dtype"), TORCH_CODES.items())
    @pytest.mark.parametrize("order", ["<", ">"], ids=["little endian heads", "big endian heads"])
    def test_tensors_have_heads_of_either_byte_order(self, tmp_path, code, dtype, order):
        for shape in [(2, 3), ()]:
            values = [np.full(shape, i).astype(dtype) for i in range(3)]
            files = [[[pack_array(value, "tensor", order)] for value in values]]
            index = LitData().index([write(tmp_path, 0, ["tensor"], files)])
            assert (index.fields[0].dtype, index.fields[0].shape) == (np.dtype(dtype), shape)
            assert same(read_column(index, "0"), values)
            assert same([decode_array(pack_array(value, "tensor", order), "tensor") for value in values], values)

    @pytest.mark.parametrize(("format", "dtype"), [("no_header_tensor:18", "i8"), ("no_header_numpy:5", "u2")])
    def test_arrays_of_one_axis_without_a_head_may_vary_in_length(self, tmp_path, format, dtype):
        values = [np.arange(size, dtype=dtype) for size in (0, 1, 300)]
        index = LitData().index([write(tmp_path, 0, [format], [[[v.tobytes()] for v in values]])])
        assert (index.fields[0].dtype, index.fields[0].shape) == (np.dtype(dtype), None)
        assert same(read_column(index, "0"), values)
        index = LitData().index(
            [write(tmp_path, 0, [format], [[[values[2].tobytes()]] * 2], item_loader="PyTreeLoader")]
        )
        assert index.fields[0].shape == (300,)

    def test_unlike_arrays_are_bytes_that_decode(self, tmp_path):
        values = [np.zeros((2, 3), "f4"), np.ones((3, 3), "f4")]
        index = LitData().index([write(tmp_path, 0, ["numpy"], [[[pack_array(value)] for value in values]])])
        assert index.fields[0].dtype is None
        assert same([decode_array(data, "numpy") for data in read_column(index, "0")], values)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "ends within its head"),
            ([4], "ends within its head"),
            ([14, 1, 0], "dtype is not known"),
            ([2**31, 1, 0], "dtype is not known"),
            ([4, 65, *[1] * 65], "more than 64 axes"),
            ([4, 2**32 - 1], "more than 64 axes"),
            ([4, 2, 1], "ends within its head"),
            ([4, 1, 5, 0], "shape does not fit its length"),
            ([4, 2, 2**16, 2**16, 0], "shape does not fit its length"),
            ([7, 64, *[2**32 - 1] * 64], "shape does not fit its length"),
        ],
    )
    def test_a_lying_head_is_corrupt(self, tmp_path, words, message):
        data = np.array(words, "<u4").tobytes()
        path = write(tmp_path, 0, ["numpy"], [[[pack_array(np.zeros((2, 2), "u1"))], [data]]])
        with pytest.raises(
            CorruptData, match=f"chunk-0-0.bin: damaged at bytes [0-9]+ to [0-9]+: .*{message}"
        ) as caught:
            LitData().index([path])
        assert caught.value.length == len(data)


class TestTokens:
    def test_windows_cross_items_but_no_shards_end(self, tmp_path):
        path = write_tokens(tmp_path, [[5, 7, 11], [3], [20]])
        index = LitData(window_tokens=4).index([path])
        assert index.first_sample.tolist() == [0, 5, 5, 10]
        assert (index.fields[0].dtype, index.fields[0].shape) == (np.dtype("<i4"), (4,))
        starts = [*range(0, 20, 4), *range(26, 46, 4)]
        assert same(read_column(index, "0"), [np.arange(start, start + 4, dtype="<i4") for start in starts])
        assert_within_files(index)

    def test_an_old_index_that_names_no_loader_is_of_tokens_if_it_is_of_one_tensor(self, tmp_path):
        path = write_tokens(tmp_path, [[8]])
        edit_json(tmp_path / "index.json", set_at(["config", "item_loader"], ...))
        assert len(LitData(window_tokens=4).index([path])) == 2

    def test_says_whether_window_tokens_is_missing_or_of_no_use(self, tmp_path):
        with pytest.raises(ValueError, match="was written for TokensLoader: say with window_tokens= how many"):
            LitData().index([write_tokens(tmp_path, [[8]])])
        with pytest.raises(ValueError, match="no shard of .* has 9 tokens, the longest 8"):
            LitData(window_tokens=9).index([write_tokens(tmp_path, [[8], [4]])])
        with pytest.raises(ValueError, match="was written for PyTreeLoader.*leave window_tokens out"):
            LitData(window_tokens=4).index([write_plain(tmp_path)])
        with pytest.raises(ValueError, match="at least 1 token"):
            LitData(window_tokens=0)

    @pytest.mark.parametrize(
        ("way", "value", "message"),
        [
            (["chunks", 0, "dim"], 9, "says 9 tokens of <i4 behind 1 items' offsets, which do not make up"),
            (["chunks", 0, "dim"], None, "dim is None, not of type int"),
            (["chunks", 0, "dim"], -1, "dim is -1, not in 0 to"),
            (["chunks", 0, "chunk_size"], 2, "it says that it holds 1 samples, and index.json 2"),
            (["config", "data_format"], ["bytes"], "data_format is .*not of one array, as TokensLoader has it"),
        ],
    )
    def test_a_lying_index_is_corrupt(self, tmp_path, way, value, message):
        path = write_tokens(tmp_path, [[8]])
        edit_json(tmp_path / "index.json", set_at(way, value))
        with pytest.raises(CorruptData, match=message):
            LitData(window_tokens=4).index([path])


class TestIndexJson:
    def test_a_folders_files_will_do(self, tmp_path):
        write_plain(tmp_path)
        assert len(LitData().index(sorted(str(path) for path in tmp_path.iterdir()))) == 10

    def test_two_datasets_of_like_samples_follow_each_other(self, tmp_path):
        paths = [write_plain(tmp_path / "a", 2), write_plain(tmp_path / "b", 3)]
        assert read_column(LitData().index(paths), "text") == [b"text" * i for i in (0, 1, 0, 1, 0, 1, 2, 0, 1, 2)]
        other = write(tmp_path / "c", (0, 0), ["int", "int"], [[[bytes(8), bytes(8)]]])
        with pytest.raises(ValueError, match="c/index.json has samples .*separate datasets"):
            LitData().index([*paths, other])

    def test_pickles_are_refused_unless_their_bytes_are_asked_for(self, tmp_path):
        path = write(tmp_path, {"x": 0}, ["pickle"], [[[b"cos\nsystem\n"]]])
        with pytest.raises(ValueError, match="leaf 'x' holds pickles, which may run any code.*allow_pickle=True"):
            LitData().index([path])
        assert read_column(LitData(allow_pickle=True).index([path]), "x") == [b"cos\nsystem\n"]

    @pytest.mark.filterwarnings("ignore:gdsdata. .* compressed shards were unpacked")
    def test_compressed_shards_are_unpacked_once_by_the_size_that_they_had_before(self, tmp_path):
        zstandard = pytest.importorskip("zstandard")
        path = write_plain(tmp_path / "data")
        expected = read_column(LitData().index([path]), "text")
        edit_json(tmp_path / "data/index.json", set_at(["config", "compression"], "zstd:4"))
        for i in range(2):
            shard = tmp_path / f"data/chunk-0-{i}.bin"
            packed = zstandard.ZstdCompressor(4).compress(shard.read_bytes())
            (tmp_path / f"data/chunk-0-{i}.zstd:4.bin").write_bytes(packed)
            shard.unlink()
            edit_json(tmp_path / "data/index.json", set_at(["chunks", i, "filename"], f"chunk-0-{i}.zstd:4.bin"))
        for _ in range(2):
            index = LitData(unpacked=str(tmp_path / "kept")).index([path])
            assert read_column(index, "text") == expected and len(os.listdir(tmp_path / "kept")) == 2

    def test_compressed_shards_say_what_unpacks_them_and_are_read_once_unpacked(self, tmp_path):
        path = write_plain(tmp_path)
        edit_json(tmp_path / "index.json", set_at(["config", "compression"], "zstd"))
        for i in range(2):
            edit_json(tmp_path / "index.json", set_at(["chunks", i, "filename"], f"chunk-0-{i}.zstd.bin"))
        (tmp_path / "chunk-0-1.bin").rename(tmp_path / "kept")
        with pytest.raises(ValueError, match=rf"\(zstd -d {tmp_path}/chunk-0-1.zstd.bin -o {tmp_path}/chunk-0-1.bin\)"):
            LitData(unpacked=None).index([path])
        (tmp_path / "kept").rename(tmp_path / "chunk-0-1.bin")
        assert len(LitData().index([path])) == 10

    @pytest.mark.parametrize("name", ["/etc/passwd", "../x", "..", "", "a\0b", None, 7, "a/..zstd./b"])
    def test_a_shard_outside_the_folder_is_refused(self, tmp_path, name):
        path = write_plain(tmp_path)
        edit_json(tmp_path / "index.json", set_at(["config", "compression"], "zstd"))
        edit_json(tmp_path / "index.json", set_at(["chunks", 0, "filename"], name))
        with pytest.raises(CorruptData, match="no path below this folder|filename is .* not of type str"):
            LitData().index([path])

    @pytest.mark.parametrize("tokens", [False, True])
    def test_a_missing_shard_is_named_with_the_index_that_lists_it(self, tmp_path, tokens):
        path = write_tokens(tmp_path, [[5], [6]]) if tokens else write_plain(tmp_path)
        (tmp_path / "chunk-0-1.bin").unlink()
        with pytest.raises(FileNotFoundError, match=rf"{path} lists it: fetch this shard.*chunk-0-1.bin"):
            LitData(window_tokens=2 if tokens else None).index([path])

    @pytest.mark.parametrize(
        ("way", "value", "message"),
        [
            (["config"], [], r"config is \[\], not of type dict"),
            (["config", "encryption"], {"algorithm": "fernet"}, "this dataset has encryption, which cannot be read"),
            (["config", "compression_level"], "row", "this dataset has compression_level='row'"),
            (["config", "compression"], 7, "compression is 7, not of type str or NoneType"),
            (["config", "item_loader"], "ParquetLoader", "the layout of 'ParquetLoader'"),
            (["config", "data_format"], [], "data_format is empty"),
            (["config", "data_format"], "jpeg", "data_format is 'jpeg', not of type list"),
            (["config", "data_format", 0], 1, "one of data_format is 1, not of type str"),
            (["config", "data_format", 0], "no_header_tensor:10", "leaf 'image' has the unknown dtype"),
            (["config", "data_format", 0], "no_header_numpy:14", "leaf 'image' has the unknown dtype"),
            (["config", "data_format", 0], "no_header_numpy:-1", "leaf 'image' has the unknown dtype"),
            (["config", "data_format", 2], "strn", "leaf 'text' has the data_format 'strn', which LitData does not"),
            (["config", "data_format", 2], "my_own", r"have its bytes with LitData\(serializers=\('my_own',\)\)"),
            (["config", "data_format", 2], "", "leaf 'text' has the data_format ''"),
            (["config", "data_format", 2], "pickle:5", "leaf 'text' holds pickles"),
            (["config", "data_format", 2], "graph:pickle", "leaf 'text' holds pickles"),
            (["config", "data_format"], ["int"] * 2, "data_spec names 3 leaves .*, and data_format has 2"),
            (["config", "data_spec"], "{", "data_spec is no tree"),
            (["config", "data_spec"], LONG_NAMES, "a leaf's name of 2000000 characters"),
            (["config", "data_spec"], "[1, " + '{"children_spec": [' * 900, "data_spec is no tree"),
            (["config", "data_spec"], '[1, {"type": "builtins.dict", "children_spec": []}]', "data_spec is no tree"),
            (["chunks"], None, "chunks is None, not of type list"),
            (["chunks"], [], "index.json': no shards are listed"),
            (["chunks", 0], 1, "a chunk is 1, not of type dict"),
            (["chunks", 0, "chunk_bytes"], 8, "index.json says 8 bytes, and it has [0-9]+"),
            (["chunks", 0, "chunk_size"], 4, "it says that it holds 5 samples, and index.json 4"),
            (["chunks", 0, "chunk_size"], 10**9, "index.json says 1000000000 samples, which take more than"),
        ],
    )
    def test_a_wrong_index_json_says_what_is_wrong(self, tmp_path, way, value, message):
        path = write_plain(tmp_path)
        edit_json(tmp_path / "index.json", set_at(way, value))
        with pytest.raises(ValueError, match=message):
            LitData().index([path])


class TestDamage:
    def test_a_carried_size_that_is_not_the_columns_is_corrupt(self, tmp_path):
        files = [[[b"ab", bytes(7), b"c"]]]
        path = write(tmp_path, [0] * 3, ["str", "int", "str"], files)
        with pytest.raises(CorruptData, match="carries another size for a column of fixed size"):
            LitData().index([path])

    def test_a_part_of_an_element_is_corrupt(self, tmp_path):
        path = write(tmp_path, 0, ["no_header_numpy:5"], [[[b"ab"], [b"abc"]]])
        with pytest.raises(CorruptData, match="column '0' is no whole number of <u2") as caught:
            LitData().index([path])
        assert caught.value.length == 3

    @pytest.mark.parametrize("name", ["chunk-0-0.bin", "index.json"])
    @pytest.mark.parametrize("seed", range(4))
    def test_no_damage_makes_an_extent_leave_its_file(self, tmp_path, name, seed):
        array = pack_array(np.zeros((2, 3), "f4"), "tensor", ">")
        files = [[[b"j" * i, array, bytes(8), bytes(2 * i)] for i in range(4)]] * 2
        path = write(tmp_path, dict.fromkeys("abcd", 0), ["jpeg", "tensor", "int", "no_header_numpy:5"], files)
        outcomes = outcomes_of_damage(
            tmp_path / name, seed, ["chunks", 0, "chunk_bytes"], lambda: LitData().index([path])
        )
        assert {"read", "CorruptData"} <= outcomes


class TestLightning:
    """Comparison with LitData's own writer."""

    @pytest.fixture
    def write(self, tmp_path):
        writer = pytest.importorskip("litdata.streaming.writer", exc_type=ImportError)

        def write(samples, **options) -> str:
            binary = writer.BinaryWriter(str(tmp_path), chunk_bytes=1 << 14, **options)
            for i, sample in enumerate(samples):
                binary[i] = sample
            binary.done()
            binary.merge()
            return str(tmp_path / "index.json")

        return write

    def test_reads_what_its_writer_writes(self, write):
        samples = [
            dict(
                image=b"i" * (50 + i),
                label=i,
                weight=i / 2,
                good=bool(i % 2),
                boxes=torch.full((2, 3), float(i)),
                ragged=np.arange(i + 1, dtype="i4"),
                unlike=np.full((2, i + 1), i, "f8"),
                tokens=torch.arange(i + 3),
                nested=[i, (2 * i, {"q": 3 * i})],
            )
            for i in range(200)
        ]
        index = LitData().index([write(samples)])
        assert len(index) == 200 and len(index.paths) > 3
        assert read_column(index, "image") == [sample["image"] for sample in samples]
        for name in ("label", "weight", "good", "boxes", "ragged", "tokens"):
            assert same(read_column(index, name), [sample[name] for sample in samples]), name
        unlike = [decode_array(data, "numpy") for data in read_column(index, "unlike")]
        assert same(unlike, [sample["unlike"] for sample in samples])
        assert same(read_column(index, "nested.1.1.q"), range(0, 600, 3))

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("level", ["chunk", "batch", "sample"])
    def test_reads_what_its_writer_compresses(self, write, tmp_path, level):
        samples = [{"text": "é" * i, "array": np.arange(i)} for i in range(300)]  # with arrays, no rows of Arrow
        index = LitData(unpacked=str(tmp_path / "kept")).index(
            [write(samples, compression="zstd", compression_level=level)]
        )
        assert [data.decode() for data in read_column(index, "text")] == ["é" * i for i in range(300)]
        assert same(read_column(index, "array"), [np.arange(i) for i in range(300)])

    def test_reads_tokens_that_its_writer_writes(self, write):
        loader = pytest.importorskip("litdata.streaming.item_loader", exc_type=ImportError).TokensLoader
        path = write([torch.arange(1000 * i, 1000 * i + 50) for i in range(100)], item_loader=loader())
        index = LitData(window_tokens=64).index([path])
        got = np.concatenate(read_column(index, "0"))
        expected = np.concatenate([np.arange(1000 * i, 1000 * i + 50) for i in range(100)])
        assert got.size > 4000 and np.isin(got, expected).all() and (np.diff(got) > 0).all()
