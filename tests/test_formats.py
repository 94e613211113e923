"""The formats: the place of each sample, and the errors that refuse a file."""

import errno
import os
import pickle
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._utils import ExceptionWrapper

from gdsdata import errors, formats
from gdsdata.errors import BackendUnavailable, CorruptData, GdsdataError, IoError, StallError
from gdsdata.formats import (
    Arrow,
    LitData,
    Mds,
    Megatron,
    Npy,
    Npz,
    Parquet,
    Records,
    Safetensors,
    Tar,
    Tokens,
    recognise,
)
from gdsdata.formats.catalog import FORMATS
from gdsdata.formats.index import Index
from gdsdata.formats.npy import parse_header
from gdsdata.formats.sample import Sample

VERSIONS = [(1, 0), (2, 0), (3, 0)]
# Hypothesis runs one test function many times with one tmp_path. Every example here overwrites its
# files.
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path, *parts) -> str:
    """Write arrays or bytes one after another, and return the path as a string."""
    path.write_bytes(b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts))
    return str(path)


def write_npy(path, array: np.ndarray, version=None) -> str:
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version=version)
    return str(path)


def npy_head(fields: str, version=(1, 0), length: int | None = None) -> bytes:
    """Make an npy header with any text for its dict. ``length`` may be false."""
    text = fields.encode("utf8")
    length = len(text) if length is None else length
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", length) + text


def llm_c_head(magic: int, tokens: int, version: int = 1) -> bytes:
    return np.array([magic, version, tokens, *[0] * 253], "<i4").tobytes()


def read(index: Index, samples) -> np.ndarray:
    """Read the samples by their extents alone, as an engine would."""
    sample = index.sample
    _, files, offsets, *_ = index.plan(np.asarray(samples, np.int64))
    assert files.dtype == np.int32 and offsets.dtype == np.int64
    arrays = []
    for file, offset in zip(files, offsets, strict=True):
        with open(index.paths[file], "rb") as stream:
            stream.seek(offset)
            data = stream.read(sample.bytes)
        assert len(data) == sample.bytes
        arrays.append(np.frombuffer(data, sample.dtype).reshape(sample.shape, order="FC"[not sample.fortran_order]))
    return np.stack(arrays)


class TestIndex:
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any))
    @many
    def test_finds_every_sample_whatever_the_files_hold(self, counts):
        index = Index(
            paths=[str(i) for i in range(len(counts))],
            size_bytes=np.zeros(len(counts), np.int64),
            mtime_ns=np.zeros(len(counts), np.int64),
            first_sample=np.cumsum([0, *counts]),
            base_bytes=np.arange(len(counts)) * 1000,
            stride_bytes=np.arange(len(counts)) + 10,
            sample=Sample(np.dtype("u1"), (10,)),
        )
        expected = [(f, f * 1000 + i * (f + 10)) for f, count in enumerate(counts) for i in range(count)]
        _, files, offsets, *_ = index.plan(np.arange(len(index)))
        assert list(zip(files.tolist(), offsets.tolist(), strict=True)) == expected
        backwards = index.plan(np.arange(len(index))[::-1]).source
        assert backwards.tolist() == files.tolist()[::-1]

    def test_remembers_size_and_time_of_each_file(self, tmp_path):
        path = write(tmp_path / "a", bytes(12))
        index = Records("u1", (3,)).index([path])
        status = os.stat(path)
        assert (index.size_bytes[0], index.mtime_ns[0]) == (12, status.st_mtime_ns)

    @pytest.mark.parametrize("name", ["bool", "uint8", "uint16", "uint64", "int8", "float16", "float64", "complex64"])
    def test_a_sample_has_torchs_dtype_in_either_byte_order(self, name):
        for order in "<>":
            sample = Sample(np.dtype(name).newbyteorder(order), (2, 3))
            assert sample.torch_dtype == getattr(torch, name)
            assert sample.bytes == 6 * np.dtype(name).itemsize
        assert Sample(np.dtype(name), (), result_dtype=torch.int64).torch_dtype == torch.int64

    @pytest.mark.parametrize("dtype", ["U4", "S4", "M8[s]", "m8[s]", "longdouble", "f4,i4", "O", "V8"])
    def test_a_dtype_that_torch_lacks_is_refused(self, dtype):
        with pytest.raises(
            ValueError, match="torch has no equivalent of numpy's .*: convert the data to one of bool, "
        ):
            Sample(np.dtype(dtype), ())


class TestRecords:
    @pytest.mark.parametrize("dtype", ["<f4", ">i2", "u1"])
    @pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
    @pytest.mark.parametrize("header_bytes", [0, 7])
    def test_reads_every_record(self, tmp_path, dtype, shape, header_bytes):
        records = np.arange(9 * np.prod(shape, dtype=int)).astype(dtype).reshape(9, *shape)
        header = bytes(header_bytes)
        paths = [
            write(tmp_path / "a", header, records[:4]),
            write(tmp_path / "b", header),
            write(tmp_path / "c", header, records[4:]),
        ]
        index = Records(dtype, shape, header_bytes).index(paths)
        assert len(index) == 9
        assert (read(index, range(9)) == records).all()

    def test_a_ragged_tail_is_corrupt(self, tmp_path):
        path = write(tmp_path / "a", bytes(10 + 3 * 12 + 5))
        with pytest.raises(CorruptData, match="behind 3 records of 12 bytes, 5 bytes are left at offset 46") as caught:
            Records("f4", (3,), header_bytes=10).index([path])
        assert (caught.value.path, caught.value.offset, caught.value.length) == (path, 46, 5)

    def test_a_file_shorter_than_its_header_is_corrupt(self, tmp_path):
        with pytest.raises(CorruptData, match="its 9 bytes are fewer than header_bytes=10"):
            Records("f4", (3,), header_bytes=10).index([write(tmp_path / "a", bytes(9))])

    @pytest.mark.parametrize("arguments", [("f4", (0,)), ("f4", (-1, 2)), ("f4", (), -1), ("U3", (1,))])
    def test_refuses_records_that_cannot_be(self, arguments):
        with pytest.raises(ValueError, match="at least one element|torch has no equivalent"):
            Records(*arguments)

    def test_takes_dtypes_of_torch_and_a_number_as_a_shape(self):
        for dtype, of_numpy in ((torch.float32, "f4"), (torch.bool, "?"), (torch.complex64, "c8")):
            assert Records(dtype, 64) == Records(dtype, np.int64(64)) == Records(np.dtype(of_numpy), (64,))
        with pytest.raises(ValueError, match="torch.float8_e5m2: name the stored bits, as in dtype='<u1'"):
            Records(torch.float8_e5m2, (4,))
        with pytest.raises(ValueError, match="numpy has no equivalent of torch.bfloat16: name the stored bits, .*<u2"):
            Records(torch.bfloat16, ())
        with pytest.raises(TypeError, match="dtype='float99' is no dtype of numpy or torch"):
            Records("float99", ())
        with pytest.raises(TypeError, match="dtype=None is no dtype of numpy or torch: write one as in '<f4'"):
            Records(None, (4,))  # numpy takes it for float64
        for shape in ("ab", "", b"ab", 1.5, (3, 0.5), None, True, (3, True)):
            with pytest.raises(TypeError, match=r"shape=.* must be whole numbers, as in \(3, 224, 224\)"):
                Records("f4", shape)

    def test_shows_its_arguments(self):
        assert repr(Records("f4", (3,))) == "Records(dtype='f4', shape=(3,), header_bytes=0)"


class TestTokens:
    @given(
        st.lists(st.integers(0, 40), min_size=1, max_size=4),
        st.integers(1, 12),
        st.one_of(st.none(), st.integers(1, 15)),
    )
    @many
    def test_reads_every_whole_window_and_crosses_no_files_end(self, tmp_path, lengths, seq_len, stride):
        files = [np.arange(100 * i, 100 * i + length, dtype="<u2") for i, length in enumerate(lengths)]
        paths = [write(tmp_path / str(i), tokens) for i, tokens in enumerate(files)]
        windows = [
            tokens[start : start + seq_len + 1]
            for tokens in files
            for start in range(0, len(tokens) - seq_len, stride or seq_len)
        ]
        tokens = Tokens("uint16", seq_len, stride)
        if windows:
            index = tokens.index(paths)
            assert len(index) == len(windows)
            assert (read(index, range(len(index))) == np.stack(windows)).all()
        else:
            with pytest.raises(ValueError, match=f"no window of {seq_len + 1} tokens .* has {max(lengths)}: use a sho"):
                tokens.index(paths)

    def test_batches_are_int64_unless_raw(self, tmp_path):
        path = write(tmp_path / "a", np.arange(100, dtype="<u2"))
        assert Tokens("uint16", seq_len=9).index([path]).sample.torch_dtype == torch.int64
        assert Tokens("uint16", seq_len=9, raw=True).index([path]).sample.torch_dtype == torch.uint16

    @pytest.mark.parametrize(("magic", "dtype"), [(20240520, "<u2"), (20240801, "<u4")])
    def test_llm_c_header_gives_dtype_and_place(self, tmp_path, magic, dtype):
        tokens = np.arange(21, dtype=dtype)
        path = write(tmp_path / "a.bin", llm_c_head(magic, 21), tokens)
        for stated in (None, dtype):
            index = Tokens(stated, seq_len=10).index([path])
            assert (read(index, [1, 0]) == [tokens[10:21], tokens[:11]]).all()
        with pytest.raises(ValueError, match=f"its header says {dtype} tokens, not Tokens.dtype='int32'"):
            Tokens("int32", seq_len=10).index([path])

    @pytest.mark.parametrize(
        ("content", "message", "offset"),
        [
            (llm_c_head(20240520, 20) + bytes(42), "counts 20 <u2 tokens, but 42 bytes follow", 8),
            (llm_c_head(20240520, 22) + bytes(42), "counts 22 <u2 tokens, but 42 bytes follow", 8),
            (llm_c_head(20240801, -1), "counts -1 <u4 tokens, but 0 bytes follow", 8),
            (llm_c_head(20240520, 21, version=2) + bytes(42), "version 2 of llm.c's header, not 1", 4),
            (llm_c_head(20240520, 21)[:1023], "header takes 1024 bytes, but the file ends at 1023", 0),
        ],
    )
    def test_a_lying_llm_c_header_is_corrupt(self, tmp_path, content, message, offset):
        with pytest.raises(CorruptData, match=message) as caught:
            Tokens(seq_len=10).index([write(tmp_path / "a.bin", content)])
        assert caught.value.offset == offset

    def test_bare_and_headed_files_mix_where_their_dtype_agrees(self, tmp_path):
        tokens = np.arange(22, dtype="<u2")
        paths = [
            write(tmp_path / "bare.npy", tokens[:11]),
            write(tmp_path / "headed.bin", llm_c_head(20240520, 11), tokens[11:]),
            write_npy(tmp_path / "true.npy", tokens[:11]),
        ]
        index = Tokens(seq_len=10).index(paths)
        assert (read(index, range(3)) == [tokens[:11], tokens[11:], tokens[:11]]).all()

    def test_files_of_unlike_dtype_are_refused_by_name(self, tmp_path):
        bare = write(tmp_path / "bare.bin", bytes(80))
        headed = write(tmp_path / "headed.bin", llm_c_head(20240801, 20), bytes(80))
        with pytest.raises(ValueError, match=f"{bare} holds <u2 tokens and {headed} holds <u4"):
            Tokens(seq_len=10).index([bare, headed])

    @pytest.mark.parametrize("array", [np.zeros(50, "f4"), np.zeros((5, 50), "u2"), np.zeros((), "u2")])
    def test_a_npy_file_that_holds_no_tokens_is_refused(self, tmp_path, array):
        with pytest.raises(ValueError, match="tokens are one-dimensional integers"):
            Tokens(seq_len=10).index([write_npy(tmp_path / "a.npy", array)])

    def test_a_bare_file_that_ends_within_a_token_is_corrupt(self, tmp_path):
        with pytest.raises(CorruptData, match="behind 20 tokens of 2 bytes, 1 bytes are left at offset 40"):
            Tokens(seq_len=10).index([write(tmp_path / "a", bytes(41))])

    def test_takes_dtypes_of_torch(self, tmp_path):
        assert Tokens(torch.uint16) == Tokens(np.dtype("u2"))
        assert len(Tokens(torch.uint32, seq_len=4).index([write(tmp_path / "a", bytes(40))])) == 2
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(ValueError, match="tokens are integers|numpy has no equivalent"):
                Tokens(dtype)

    @pytest.mark.parametrize("stride", [2**59 + 1, 2**62, 10**30])
    def test_a_stride_longer_than_any_file_gives_the_first_window(self, tmp_path, stride):
        np.arange(9, dtype=np.uint16).tofile(tmp_path / "a.bin")
        index = Tokens("u2", seq_len=1, stride=stride).index([str(tmp_path / "a.bin")])
        assert len(index) == 1 and index.plan(np.array([0])).offset.tolist() == [0]

    @pytest.mark.parametrize("arguments", [{"dtype": "f4"}, {"dtype": "bool"}, {"seq_len": 0}, {"stride": 0}])
    def test_refuses_arguments_that_make_no_windows(self, arguments):
        with pytest.raises(ValueError, match="tokens are integers|are at least 1"):
            Tokens(**arguments)


@pytest.mark.parametrize("value", [2.5, 2.0, "2", True, np.float64(2)])
def test_sizes_that_are_no_whole_numbers_are_refused(value):
    """Half of an odd seq_len as stride once gave windows that began within a token."""
    for name, make in [
        ("seq_len", lambda: Tokens(seq_len=value)),
        ("stride", lambda: Tokens(stride=value)),
        ("header_bytes", lambda: Records("u1", (), value)),
        ("seq_len", lambda: Megatron(value)),
        ("num_samples", lambda: Megatron(2, num_samples=value)),
        ("seed", lambda: Megatron(2, seed=value)),
        ("window_tokens", lambda: LitData(value)),
    ]:
        with pytest.raises(TypeError, match=f"{name}=.* must be a whole number"):
            make()


@pytest.mark.parametrize("names", [5, 0.5, [1, 2], [None], b"ab", ["a", "a"]])
def test_names_that_are_none_are_refused_by_their_argument(names):
    for argument, make in [
        ("columns", lambda: Parquet(names)),
        ("columns", lambda: Arrow(names)),
        ("fields", lambda: Tar(names)),
        ("array", lambda: Npz("rows", names)),
        ("tensor", lambda: Safetensors("rows", names)),
    ]:
        with pytest.raises(ValueError, match=f"{argument}.* each (array )?once"):
            make()


@pytest.mark.parametrize(("format", "name"), [(Tar, "index_cache"), (Mds, "unpacked"), (LitData, "unpacked")])
def test_places_of_kept_files_that_are_none_are_refused(format, name):
    for place in (7, True, b"x", ["user"]):
        said = f"{name}={place!r} must be 'user', 'beside', the path of a folder, or None"
        with pytest.raises(TypeError, match=re.escape(said)):
            format(**{name: place})
    with pytest.raises(ValueError, match=f"{name}='' is empty: give 'user', 'beside', the path of a folder, or None"):
        format(**{name: ""})


@pytest.mark.parametrize("format", [Mds, LitData])
def test_shards_that_are_left_out_are_named_by_a_list_of_paths(format):
    assert format(without=[Path("a/shard.0"), "b/shard.1"]) == format(without=("a/shard.0", "b/shard.1"))
    for without in ("a/shard.0", b"a", 7, None, [7]):
        said = f"without={without!r} must be a list of the shards' paths"
        with pytest.raises(TypeError, match=re.escape(said)):
            format(without=without)


@pytest.mark.parametrize("split", [0.9, None, "train", "", (0.5,), ("0", "1"), {}])
def test_a_split_of_megatron_that_is_no_pair_is_refused(split):
    with pytest.raises(TypeError, match="split=.* must be two numbers, where the part begins and where it ends"):
        Megatron(split=split)


def test_serializers_that_are_no_names_are_refused():
    for serializers in (7, None, [7]):
        with pytest.raises(TypeError, match="serializers=.* must be a tuple of names"):
            LitData(serializers=serializers)
    assert LitData(serializers=iter(["one", "two"])) == LitData(serializers=("one", "two"))


def test_sizes_of_numpy_are_whole_numbers():
    assert Tokens(seq_len=np.int64(4), stride=np.uint8(2)) == Tokens(seq_len=4, stride=2)
    assert repr(Records("u1", (), np.int32(3))) == repr(Records("u1", (), 3))


SHAPES = [(), (5,), (3, 4), (2, 3, 4), (0,), (3, 0), (0, 3), (1, 1)]


class TestNpy:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("order", "CF")
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_file_is_a_sample_as_numpy_wrote_it(self, tmp_path, version, order, shape):
        for dtype in ("<f4", ">f8", ">u2", "|b1", "<c8", "|i1"):
            numbers = np.arange(3 * np.prod(shape, dtype=int)).astype(dtype)
            arrays = [np.asarray(part.reshape(shape), order=order) for part in np.split(numbers, 3)]
            paths = [write_npy(tmp_path / f"{i}.npy", array, version) for i, array in enumerate(arrays)]
            index = Npy("file").index(paths)
            assert len(index) == 3 and index.sample.dtype == np.dtype(dtype)
            assert (read(index, [2, 0, 1]) == np.stack([arrays[2], arrays[0], arrays[1]])).all()

    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (0, 4), (3, 0)])
    def test_a_row_is_a_sample_of_every_file(self, tmp_path, version, shape):
        rows = np.arange(np.prod(shape, dtype=int), dtype=">i4").reshape(shape)
        paths = [
            write_npy(tmp_path / "a.npy", rows, version),
            write_npy(tmp_path / "b.npy", rows[:1], version),
            write_npy(tmp_path / "c.npy", rows[::-1].copy(), version),
        ]
        expected = np.concatenate([rows, rows[:1], rows[::-1]])
        index = Npy("row").index(paths)
        assert len(index) == len(expected)
        if len(expected):
            assert (read(index, range(len(index))) == expected).all()

    def test_an_unshaped_descr_as_others_write_it_is_read(self):
        head = npy_head("{'shape':(2,3),'descr':'<u1','fortran_order':False}\n")
        header = parse_header(head + b"data", "a")
        assert (header.dtype, header.fortran_order, header.shape) == (np.dtype("u1"), False, (2, 3))
        assert header.data_offset == len(head)

    def test_a_header_longer_than_the_first_read_is_read_again(self, tmp_path):
        head = npy_head("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}" + " " * 5000 + "\n")
        index = Npy().index([write(tmp_path / "a.npy", head, np.array([1, 2, 3], "<f4"))])
        assert read(index, [0]).tolist() == [[1, 2, 3]]
        paths = [write(tmp_path / "b.npy", head[:3000])]
        with pytest.raises(CorruptData, match="is 5066 bytes long, but ends after 3000"):
            Npy().index(paths)

    def test_bytes_behind_the_data_are_ignored(self, tmp_path):
        path = write_npy(tmp_path / "a.npy", np.arange(3))
        with open(path, "ab") as file:
            file.write(b"more")
        assert read(Npy().index([path]), [0]).tolist() == [[0, 1, 2]]

    @pytest.mark.parametrize("mode", ["file", "row"])
    def test_a_file_cut_anywhere_is_corrupt(self, tmp_path, mode):
        path = tmp_path / "a.npy"
        write_npy(path, np.zeros((2, 3), "f4"))
        whole = path.read_bytes()
        for length in range(len(whole)):
            with pytest.raises(CorruptData) as caught:
                Npy(mode).index([write(path, whole[:length])])
            assert caught.value.path == str(path) and str(path) in str(caught.value)

    @pytest.mark.parametrize(
        ("head", "message"),
        [
            (b"\x93NUMPX\x01\x00v\x00", "starts with b'.x93NUMPX'"),
            (npy_head("{}\n", version=(4, 0)), "version bytes .* are none of 1.0, 2.0 and 3.0"),
            (npy_head("{}\n", version=(2, 0), length=2**32 - 1), "length of 4294967295 bytes .* is absurd"),
            (npy_head("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}\n", length=20), "end with a newline"),
            (npy_head("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}\n", length=99), "but ends after 66"),
            (npy_head("[1, 2]\n"), "no dict of descr"),
            (npy_head("{'descr': '<f4', 'fortran_order': False}\n"), "no dict of descr"),
            (npy_head("{'descr': '<f4', 'fortran_order': False, 'shape': (), 'x': 1}\n"), "no dict of descr"),
            (npy_head("{'descr': '<f4', 'fortran_order': 0, 'shape': ()}\n"), "fortran_order is 0"),
            (npy_head("{'descr': '<f4', 'fortran_order': True, 'shape': [1]}\n"), "is no tuple of sizes"),
            (npy_head("{'descr': '<f4', 'fortran_order': True, 'shape': (-1, 2)}\n"), "is no tuple of sizes"),
            (npy_head("{'descr': '<f4', 'fortran_order': True, 'shape': (True,)}\n"), "is no tuple of sizes"),
            (npy_head("{'descr': '<f4', 'fortran_order': True, 'shape': (2**9,)}\n"), "is no Python literal"),
            (npy_head(f"{{'descr': '<f4', 'fortran_order': True, 'shape': ({2**62},)}}\n"), "is absurd"),
            (npy_head(f"{{'descr': '<f4', 'fortran_order': True, 'shape': (0, {2**63})}}\n"), "is absurd"),
            (npy_head("{'descr': 'wrong', 'fortran_order': True, 'shape': ()}\n"), "descr 'wrong' is no dtype"),
            (npy_head("{'descr': 4, 'fortran_order': True, 'shape': ()}\n"), "descr 4 is no dtype"),
            (npy_head("(" * 9000 + "\n"), "is no Python literal"),
            (npy_head("-" * 9000 + "1\n"), "is no Python literal"),
        ],
        ids=lambda value: value if isinstance(value, str) else "head",
    )
    def test_a_lying_header_is_corrupt(self, head, message):
        with pytest.raises(CorruptData, match=message) as caught:
            parse_header(head, "the/path.npy")
        assert caught.value.path == "the/path.npy" and "the/path.npy" in str(caught.value)

    @given(st.sampled_from(VERSIONS), st.integers(0, 2**32))
    @settings(max_examples=500, deadline=None)
    def test_a_mutated_header_is_read_or_refused_and_nothing_else(self, version, seed):
        chance = random.Random(seed)
        text = "{'descr': '>f4', 'fortran_order': False, 'shape': (12, 34), }   \n"
        head = bytearray(npy_head(text, version))
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(head))
            head[place : place + chance.randint(0, 2)] = chance.choice(
                [bytes([chance.randrange(256)]), b"9" * 9, b"O", b"(", b"{", b"'", b"\\", b"\x00", b"", b"-", b","]
            )
        try:
            header = parse_header(bytes(head), "a")
        except ValueError:
            return
        assert header.data_offset <= len(head) and 0 <= header.data_bytes <= 2**62

    @given(st.binary(max_size=200))
    @settings(max_examples=200, deadline=None)
    def test_any_bytes_behind_the_magic_are_refused_in_words(self, noise):
        for start in (b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00", npy_head("", length=len(noise))):
            try:
                parse_header(start + noise, "a")
            except ValueError as error:
                assert "a: " in str(error)

    def test_a_pickle_is_refused(self, tmp_path):
        np.save(tmp_path / "a.npy", np.array([{}], dtype=object))
        with pytest.raises(
            ValueError, match="a.npy: it holds Python objects, a pickle that may run any code"
        ) as caught:
            Npy().index([str(tmp_path / "a.npy")])
        assert not isinstance(caught.value, CorruptData)

    @pytest.mark.parametrize(
        ("array", "message"),
        [
            (np.zeros(2, "f4,i4"), "a.npy: it holds records .* save each field"),
            (np.zeros(2, "U3"), "a.npy: torch has no equivalent of numpy's <U3"),
            (np.zeros(2, "M8[s]"), "a.npy: torch has no equivalent of numpy's datetime64"),
        ],
    )
    def test_a_dtype_that_torch_lacks_is_refused_by_file(self, tmp_path, array, message):
        with pytest.raises(ValueError, match=message):
            Npy().index([write_npy(tmp_path / "a.npy", array)])

    @pytest.mark.parametrize(
        "other", [np.zeros((3, 5), "f4"), np.zeros((4, 3), "f8"), np.zeros((4, 3), ">f4"), np.zeros((4, 3), "f4", "F")]
    )
    def test_unequal_files_are_refused_by_name_and_shape(self, tmp_path, other):
        first = write_npy(tmp_path / "first.npy", np.zeros((4, 3), "f4"))
        second = write_npy(tmp_path / "second.npy", other)
        with pytest.raises(
            ValueError, match=rf"<f4 of shape \(4, 3\) in {first}, .* of shape .* in {second}; save them"
        ):
            Npy("file").index([first, first, second])

    def test_files_that_differ_in_length_are_refused_with_a_format_that_takes_them(self, tmp_path):
        first = write_npy(tmp_path / "a.npy", np.zeros((3, 2)))
        longer, wider = (write_npy(tmp_path / f"{shape}.npy", np.zeros(shape)) for shape in ((5, 2), (3, 4)))
        with pytest.raises(ValueError, match=r"of shape \(5, 2\) in .*npz files may differ in length"):
            Npy().index([first, longer])
        with pytest.raises(ValueError, match=r"of shape \(3, 4\) in .*; save them alike"):
            Npy().index([first, wider])

    def test_unequal_rows_are_refused_by_name_and_shape(self, tmp_path):
        first = write_npy(tmp_path / "first.npy", np.zeros((4, 3), "f4"))
        second = write_npy(tmp_path / "second.npy", np.zeros((4, 2), "f4"))
        with pytest.raises(ValueError, match=rf"shape \(3,\) in {first}, <f4 of shape \(2,\) in {second}"):
            Npy("row").index([first, second])

    def test_rows_in_fortran_order_or_of_a_single_element_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="Fortran order, so the elements of a row .*ascontiguousarray"):
            Npy("row").index([write_npy(tmp_path / "a.npy", np.zeros((4, 3), order="F"))])
        with pytest.raises(ValueError, match='has no rows: use Npy."file".'):
            Npy("row").index([write_npy(tmp_path / "b.npy", np.zeros(()))])

    def test_refuses_another_mode(self):
        with pytest.raises(ValueError, match="Npy.mode='column'.: mode is"):
            Npy("column")


class TestErrors:
    @pytest.mark.parametrize(
        "error",
        [
            IoError(errno.EIO, "reading failed", "a.bin", 512, 4096),
            CorruptData("cut short", "a.bin", 512, 4096),
            StallError("nothing moved", {"in_flight": 3}),
            BackendUnavailable("no uring", ["the kernel says no"]),
        ],
    )
    def test_an_error_keeps_its_words_and_numbers_between_processes(self, error):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and isinstance(copy, GdsdataError)
        assert str(copy) == str(error) and vars(copy) == vars(error)

    @pytest.mark.parametrize(
        "kind", [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, GdsdataError)]
    )
    def test_an_error_of_a_dataloaders_worker_keeps_its_type(self, kind):
        try:
            raise kind(errno.EACCES, "not read") if issubclass(kind, OSError) else kind("not read")
        except GdsdataError:
            of_worker = ExceptionWrapper(where="in DataLoader worker process 0")
        with pytest.raises(kind, match="(?s)^Caught .* in DataLoader worker process 0.*: not read") as caught:
            of_worker.reraise()
        assert caught.type is kind
        if issubclass(kind, OSError):
            assert caught.value.errno == errno.EIO  # torch passes the words alone

    def test_an_io_error_is_an_os_error_that_shows_its_message(self):
        error = IoError(errno.EIO, "reading failed", "a.bin", 512, 4096)
        assert isinstance(error, OSError) and error.errno == errno.EIO
        assert str(error) == "reading failed"
        assert (error.path, error.offset, error.length) == ("a.bin", 512, 4096)


class TestRegistry:
    def test_the_package_names_what_the_catalog_does(self):
        names = {entry.name for entry in FORMATS}
        assert set(formats.__all__) == names | {"recognise", "register"}
        assert {getattr(formats, name).__name__ for name in names} == names

    def test_recognizes_what_has_a_magic(self, tmp_path):
        assert recognise([write_npy(tmp_path / "a", np.zeros(3))]) == Npy("file")
        assert recognise([write(tmp_path / "b", llm_c_head(20240520, 0))]) == Tokens()
        assert recognise([write(tmp_path / "c.npy", llm_c_head(20240801, 0))]) == Tokens()

    def test_says_what_to_pass_for_the_rest(self, tmp_path):
        with pytest.raises(ValueError, match=r"does not show its format .*: pass format=Tokens"):
            recognise([write(tmp_path / "a.bin", b"12345678")])
        with pytest.raises(ValueError, match="it has no npy magic, so it may be bare tokens; pass format=Tokens"):
            recognise([write(tmp_path / "a.npy", b"12345678")])
