"""Megatron-LM's indexed datasets: windows by its rules, and false values in files refused."""

import errno
import os
import random
import struct
import sys

import numpy as np
import pytest
import torch
from helpers import require_direct
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import Index
from gdsdata.formats.megatron import Megatron, parse_index
from gdsdata.formats.parsers.magics import MEGATRON
from gdsdata.formats.windows import WindowIndex

# Hypothesis runs one test function many times with one tmp_path. Every example here overwrites its
# files.
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}

# `Megatron(4, seed=1234, num_samples=12)` of sequences of 5, 0, 3, 9 and 4 tokens, as Megatron-LM's
# own code (d98e8a64) cuts and shuffles them: three epochs, with the last one shuffled apart.
MEGATRONS_WINDOWS = [
    [2, 3, 4, 8, 9],
    [11, 12, 13, 14, 15],
    [19, 20, 0, 1, 2],
    [6, 7, 17, 18, 19],
    [0, 1, 2, 3, 4],
    [13, 14, 15, 16, 17],
    [9, 10, 11, 12, 13],
    [5, 6, 7, 5, 6],
    [4, 8, 9, 10, 11],
    [17, 18, 19, 20, 0],
    [13, 14, 15, 16, 5],
    [2, 3, 4, 17, 18],
    [9, 10, 11, 12, 13],
    [15, 16, 0, 1, 2],
    [18, 19, 20, 8, 9],
]


def idx(lengths, code=8, *, pointers=None, bounds=None, modes=b"", magic=MEGATRON, version=1, counts=None) -> bytes:
    """Make an .idx file of adjacent sequences of ``lengths``. Arguments make any part false."""
    lengths = np.asarray(lengths, np.int64)
    if pointers is None:
        pointers = (np.cumsum(lengths) - lengths) * np.dtype(CODES.get(code, "u1")).itemsize
    bounds = np.arange(len(lengths) + 1) if bounds is None else bounds
    counts = (len(lengths), len(bounds)) if counts is None else counts
    head = struct.pack("<9sQBQQ", magic, version, code, *counts)
    arrays = [np.asarray(lengths, "<i4"), np.asarray(pointers, "<i8"), np.asarray(bounds, "<i8")]
    return head + b"".join(array.tobytes() for array in arrays) + modes


def write_pair(folder, name, lengths, code=8, first=0, **parts) -> str:
    """Write a pair whose tokens count up from ``first``, and return the path of its .idx file."""
    (folder / f"{name}.idx").write_bytes(idx(lengths, code, **parts))
    (folder / f"{name}.bin").write_bytes(np.arange(first, first + sum(lengths)).astype(CODES[code]).tobytes())
    return str(folder / f"{name}.idx")


def read_windows(index: WindowIndex | Index, samples) -> list[list[int]]:
    """Read the samples by their extents alone, as an engine would."""
    if isinstance(index, Index):
        data = [np.fromfile(path, np.uint8) for path in index.paths]
        plan = index.plan(np.asarray(samples, np.int64))
        places = zip(plan.source, plan.offset, strict=True)
        return [data[file][at : at + index.sample.bytes].view(index.sample.dtype).tolist() for file, at in places]
    _, files, offsets, lengths, sample_ptr = index.plan(np.asarray(samples, np.int64))
    pieces = np.diff(sample_ptr)
    assert (files.dtype, offsets.dtype, lengths.dtype, pieces.dtype) == (np.int32, np.int64, np.int64, np.int64)
    assert len(files) == len(offsets) == len(lengths) == pieces.sum() and len(pieces) == len(samples)
    assert (lengths > 0).all() and (pieces > 0).all()
    data = [np.fromfile(path, np.uint8) for path in index.paths]
    parts = [data[file][at : at + n] for file, at, n in zip(files, offsets, lengths, strict=True)]
    assert [len(part) for part in parts] == lengths.tolist()
    ends = np.cumsum(pieces).tolist()
    bounds = zip([0, *ends[:-1]], ends, strict=True)
    return [np.concatenate(parts[begin:end]).view(index.sample.dtype).tolist() for begin, end in bounds]


def windows_by_the_rules(lengths, seq_len, seed=None, num_samples=None, drop_last=True) -> list[list[int]]:
    """Return the windows of one pair of `write_pair`, token by token, as Megatron's sources say."""
    begins = np.cumsum([0, *lengths]).tolist()
    tokens_an_epoch, epochs = begins[-1], 1
    while num_samples is not None and epochs * tokens_an_epoch < num_samples * seq_len + 1:
        epochs += 1
    windows_of_earlier = ((epochs - 1) * tokens_an_epoch - 1) // seq_len
    windows_an_epoch = (tokens_an_epoch - 1) // seq_len
    last_apart = epochs > 1 and num_samples - windows_of_earlier < int(0.8 * windows_an_epoch)

    state = None if seed is None else np.random.RandomState(seed)

    def shuffled(items):
        items = np.array(items, np.int64)
        if state is not None:
            state.shuffle(items)
        return items.tolist()

    one = list(range(len(lengths)))
    documents = shuffled(one * (epochs - 1)) + shuffled(one) if last_apart else shuffled(one * epochs)
    tokens = [token for document in documents for token in range(begins[document], begins[document + 1])]
    windows = []
    while len(windows) * seq_len + seq_len + 1 <= len(tokens):
        at = len(windows) * seq_len
        windows.append(tokens[at : at + seq_len + 1])
    rest = tokens[len(windows) * seq_len :]
    if not drop_last and len(rest) > 1:  # a single token has been the last target already
        windows.append(rest)
    first = windows_of_earlier if last_apart else len(windows)
    order = shuffled(range(first)) + shuffled(range(first, len(windows)))
    return [windows[i] for i in order]


documents = st.lists(st.one_of(st.just(0), st.integers(0, 8), st.integers(0, 70)), min_size=1, max_size=25)
seeds = st.one_of(st.none(), st.integers(0, 2**32 - 1))


class TestWindows:
    @given(documents.filter(any), st.integers(1, 30), seeds, st.one_of(st.none(), st.integers(1, 150)), st.booleans())
    @many
    def test_are_those_of_the_rules(self, tmp_path, lengths, seq_len, seed, num_samples, drop_last):
        expected = windows_by_the_rules(lengths, seq_len, seed, num_samples, drop_last)
        windows = Megatron(seq_len, seed, num_samples, drop_last=drop_last)
        path = write_pair(tmp_path, "a", lengths)
        if not expected:
            with pytest.raises(ValueError, match=f"no window of {seq_len + 1} tokens"):
                windows.index([path])
            return
        index = windows.index([path])
        assert len(index) == len(expected) >= (num_samples or 0)
        assert read_windows(index, range(len(index))) == expected
        backwards = list(range(len(index)))[::-1]
        assert read_windows(index, backwards) == expected[::-1]

    @given(st.lists(documents, min_size=2, max_size=4), st.integers(1, 9), seeds, st.booleans())
    @many
    def test_of_several_pairs_are_each_pairs_own(self, tmp_path, pairs, seq_len, seed, drop_last):
        firsts = [1000 * i for i in range(len(pairs))]
        paths = [write_pair(tmp_path, i, lengths, 4, firsts[i]) for i, lengths in enumerate(pairs)]
        expected = [
            [token + first for token in window]
            for lengths, first in zip(pairs, firsts, strict=True)
            for window in windows_by_the_rules(lengths, seq_len, seed, drop_last=drop_last)
        ]
        if expected:
            index = Megatron(seq_len, seed, drop_last=drop_last).index(paths)
            assert read_windows(index, range(len(index))) == expected

    def test_are_those_that_megatron_itself_gave(self, tmp_path):
        index = Megatron(4, seed=1234, num_samples=12).index([write_pair(tmp_path, "a", [5, 0, 3, 9, 4])])
        assert read_windows(index, range(len(index))) == MEGATRONS_WINDOWS

    @pytest.mark.parametrize("num_samples, apart", [(20, True), (33, True), (34, False), (39, False)])
    def test_the_last_epoch_is_apart_if_fewer_than_four_fifths_of_its_windows_are_wanted(
        self, tmp_path, num_samples, apart
    ):
        """100 tokens give 19 windows of 5 in each epoch, and 15 are four fifths of them."""
        lengths = [10] * 10
        index = Megatron(5, 7, num_samples).index([write_pair(tmp_path, "a", lengths)])
        windows = read_windows(index, range(len(index)))
        assert len(windows) == 39 and windows == windows_by_the_rules(lengths, 5, 7, num_samples)
        targets = [token for window in windows[:19] for token in window[1:]]
        assert (len(set(targets)) == len(targets)) == apart  # only a first epoch alone has each token once

    def test_lie_in_one_piece_where_their_sequences_do(self, tmp_path):
        path = write_pair(tmp_path, "a", [3, 0, 4, 5, 1, 7])
        other = write_pair(tmp_path, "c", [9, 2], first=50)
        empty = write_pair(tmp_path, "d", [2])  # too short for a window
        index = Megatron(4).index([path, other, empty])
        assert isinstance(index, Index) and index.stride_bytes.tolist() == [8, 8, 8]
        windows = windows_by_the_rules([3, 0, 4, 5, 1, 7], 4)
        assert read_windows(index, range(len(index))) == [*windows, [*range(50, 55)], [*range(54, 59)]]
        assert isinstance(Megatron(4, seed=1).index([path]), WindowIndex)
        gap = write_pair(tmp_path, "b", [3, 3], pointers=[0, 8])
        (tmp_path / "b.bin").write_bytes(np.array([0, 1, 2, 99, 3, 4, 5], "u2").tobytes())
        index = Megatron(5).index([gap])
        assert read_windows(index, [0]) == [[0, 1, 2, 3, 4, 5]]
        assert index.plan(np.arange(1)).sample_ptr.tolist() == [0, 2]

    def test_are_the_same_every_time_and_leave_numpys_generator_alone(self, tmp_path):
        path = write_pair(tmp_path, "a", list(range(60)))
        np.random.seed(5)
        before = np.random.get_state()[1].tolist()
        one, two = (Megatron(16, 3).index([path]) for _ in range(2))
        samples = np.arange(len(one))
        assert all((a == b).all() for a, b in zip(one.plan(samples), two.plan(samples), strict=True))
        other = Megatron(16, 4).index([path])
        assert read_windows(other, samples) != read_windows(one, samples)
        assert np.random.get_state()[1].tolist() == before

    def test_come_out_as_int64_whatever_is_stored(self, tmp_path):
        sample = Megatron(4).index([write_pair(tmp_path, "a", [9], 4)]).sample
        assert (sample.dtype, sample.shape, sample.torch_dtype) == (np.dtype("<i4"), (5,), torch.int64)

    @pytest.mark.parametrize("seed", [None, 1])
    def test_of_files_beyond_the_range_of_32_bits(self, tmp_path, seed):
        lengths = [2**31 - 1] * 6
        (tmp_path / "a.idx").write_bytes(idx(lengths, 4))
        with open(tmp_path / "a.bin", "wb") as file:
            file.truncate(sum(lengths) * 4)  # a hole, which takes no space
        index = Megatron(2**30, seed).index([str(tmp_path / "a.idx")])
        assert len(index) == (6 * (2**31 - 1) - 1) // 2**30 == 11
        if seed is None:
            assert index.plan(np.arange(11)).offset.tolist() == [i * 2**32 for i in range(11)]
            return
        _, _, offsets, lengths_bytes, sample_ptr = index.plan(np.arange(11))
        pieces = np.diff(sample_ptr)
        assert np.add.reduceat(lengths_bytes, np.cumsum(pieces) - pieces).tolist() == [(2**30 + 1) * 4] * 11
        assert offsets.min() >= 0 and (offsets + lengths_bytes).max() <= index.size_bytes[0]

    def test_of_a_split_are_those_of_its_sequences(self, tmp_path):
        lengths = [7] * 10
        path = write_pair(tmp_path, "a", lengths)
        train, valid = Megatron(6, split=(0, 0.75)).index([path]), Megatron(6, split=(0.75, 1)).index([path])
        assert read_windows(train, range(len(train))) == windows_by_the_rules([7] * 8, 6)
        assert read_windows(valid, range(len(valid))) == [list(range(56, 63)), list(range(62, 69))]

    def test_take_the_same_lines_of_python_for_one_as_for_a_thousand(self, tmp_path):
        index = Megatron(4, 1).index([write_pair(tmp_path, "a", [3] * 2000)])

        def lines(samples):
            count = 0

            def trace(frame, event, argument):
                nonlocal count
                count += event == "line"
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                index.plan(samples)
            finally:
                sys.settrace(before)
            return count

        index.plan(np.arange(1))  # makes the table of the files
        assert 0 < lines(np.arange(1)) == lines(np.arange(1000))


class TestSequences:
    @pytest.mark.parametrize("code", CODES)
    def test_are_the_samples_without_seq_len(self, tmp_path, code):
        lengths = [3, 0, 5]
        paths = [write_pair(tmp_path, "a", lengths, code), write_pair(tmp_path, "b", [2], code, 20)]
        index = Megatron().index(paths)
        assert isinstance(index, FieldIndex) and len(index) == 4
        assert index.fields == (Field("tokens", np.dtype(CODES[code]).newbyteorder("<")),)
        _, files, offsets, lengths_bytes, _ = index.plan(np.arange(4))
        read = []
        for file, at, length in zip(files, offsets, lengths_bytes, strict=True):
            with open(index.paths[file], "rb") as stream:
                stream.seek(at)
                read.append(np.frombuffer(stream.read(length), CODES[code]).tolist())
        assert read == [[0, 1, 2], [], [3, 4, 5, 6, 7], [20, 21]]

    def test_of_a_split_are_rounded_as_megatron_rounds(self, tmp_path):
        path = write_pair(tmp_path, "a", [1] * 1000)
        bounds = [0, 0.969, 0.999, 1]
        sizes = [len(Megatron(split=split).index([path])) for split in zip(bounds[:-1], bounds[1:], strict=True)]
        assert sizes == [969, 30, 1]


class TestPaths:
    def test_a_pair_is_found_by_either_of_its_files_and_once(self, tmp_path):
        one = write_pair(tmp_path, "a.v1", [5]), write_pair(tmp_path, "b", [6])
        bins = [path.replace(".idx", ".bin") for path in one]
        for paths in (list(one), bins, sorted([*one, *bins])):
            index = Megatron().index(paths)
            assert index.paths == bins and len(index) == 2
        status = os.stat(bins[0])
        assert (index.size_bytes[0], index.mtime_ns[0]) == (10, status.st_mtime_ns)

    @pytest.mark.parametrize("missing", ["a.idx", "a.bin"])
    def test_a_pair_without_one_of_its_files_is_refused(self, tmp_path, missing):
        path = write_pair(tmp_path, "a", [5])
        os.remove(tmp_path / missing)
        other = tmp_path / ("a.bin" if missing == "a.idx" else "a.idx")
        with pytest.raises(FileNotFoundError, match=rf"the other file of its pair, {other}, .*{missing}") as caught:
            Megatron().index([path])
        assert caught.value.filename == str(tmp_path / missing)

    def test_an_idx_that_is_a_folder_is_an_io_error(self, tmp_path):
        path = write_pair(tmp_path, "a", [5])
        os.remove(path)
        os.mkdir(path)
        with pytest.raises(IoError, match="a.idx"):
            Megatron().index([path])

    def test_an_idx_that_numpy_cannot_read_is_an_io_error_with_a_number(self, tmp_path, monkeypatch):
        """numpy's errors have no errno."""
        path = write_pair(tmp_path, "a", [5])

        def refuse(*_: object) -> None:
            raise OSError("obtaining file position failed")

        monkeypatch.setattr(np, "fromfile", refuse)
        with pytest.raises(IoError, match="a.idx failed: obtaining file position failed") as caught:
            Megatron().index([path])
        assert caught.value.errno == errno.EIO

    def test_files_of_other_suffixes_and_unlike_pairs_are_refused(self, tmp_path):
        one, two = write_pair(tmp_path, "a", [5], 8), write_pair(tmp_path, "b", [5], 4)
        with pytest.raises(ValueError, match="notes.txt is neither an .idx nor a .bin file"):
            Megatron().index([one, str(tmp_path / "notes.txt")])
        with pytest.raises(
            ValueError, match=r"a.bin holds uint16 tokens and .*b.bin holds int32: read them as separate"
        ):
            Megatron().index([one, two])
        with pytest.raises(ValueError, match="holds float32, and windows are of integers"):
            Megatron(2).index([write_pair(tmp_path, "c", [5], 7)])


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (dict(seed=1), "pass seq_len too"),
        (dict(num_samples=1), "pass seq_len too"),
        (dict(drop_last=False), "pass seq_len too"),
        (dict(seq_len=0), "at least 1"),
        (dict(seq_len=1, num_samples=0), "at least 1"),
        (dict(seq_len=1, seed=2**32), "seeds from 0 to"),
        (dict(seq_len=1, seed=-1), "seeds from 0 to"),
        (dict(split=(0.5, 0.4)), "split is where"),
        (dict(split=(0, 1.1)), "split is where"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        Megatron(**arguments)


class TestDamage:
    """Three sequences of 3, 0 and 5 uint16 tokens.

    Lengths begin at byte 34, pointers at 46, document bounds at 70.
    """

    BIN_BYTES = 16

    @pytest.mark.parametrize(
        "data, offset, length, reason",
        [
            (b"", 0, 9, "it starts with b''"),
            (b"MMIDIDX\0\1" + bytes(93), 0, 9, "it starts with"),
            (idx([3, 0, 5])[:33], 0, 33, "its head takes 34 bytes, but it ends at 33"),
            (idx([3, 0, 5], version=2), 9, 8, "version 2, not 1"),
            (idx([3, 0, 5], code=0), 17, 1, "code 0 is of no dtype"),
            (idx([3, 0, 5], code=9), 17, 1, "code 9 is of no dtype"),
            (idx([3, 0, 5])[:-1], 18, 16, "take 68 bytes behind its head, but 67 follow: it was cut short"),
            (idx([3, 0, 5]) + b"1", 18, 16, "but 69 follow"),
            (idx([3, 0, 5], counts=(2**64 - 1, 4)), 18, 16, "18446744073709551615 sequences"),
            (idx([3, 0, 5], counts=(3, 2**63)), 18, 16, "9223372036854775808 document bounds"),
            (idx([3, -1, 5]), 38, 4, "sequence 1 has -1 tokens"),
            (idx([3, 0, 6]), 62, 8, "sequence 2, 6 tokens of uint16 at 6, is not within the 16 bytes"),
            (idx([3, 0, 5], pointers=[0, 18, 6]), 54, 8, "sequence 1, 0 tokens"),
            (idx([3, 0, 5], pointers=[-2, 6, 6]), 46, 8, "at -2"),
            (idx([3, 0, 5], pointers=[1, 6, 6]), 46, 8, "not on a token"),
            (idx([3, 0, 5], pointers=[0, 6, 2**63 - 2]), 62, 8, "at 9223372036854775806"),
            (idx([3, 0, 2**31 - 1], 5, pointers=[0, 0, 8]), 46, 8, "3 tokens of int64"),
            (idx([3, 0, 5], bounds=[0, 2, 1, 3]), 70, 32, "4 document bounds do not rise from 0 to its 3"),
            (idx([3, 0, 5], bounds=[1, 1, 2, 3]), 70, 32, "do not rise"),
            (idx([3, 0, 5], bounds=[0, 1, 2, 2]), 70, 32, "do not rise"),
            (idx([3, 0, 5], bounds=[]), 70, 0, "0 document bounds do not rise"),
        ],
    )
    def test_is_found_where_it_is(self, data, offset, length, reason):
        with pytest.raises(CorruptData, match=reason) as caught:
            parse_index(data, "here.idx", self.BIN_BYTES)
        assert (caught.value.path, caught.value.offset, caught.value.length) == ("here.idx", offset, length)
        assert str(caught.value).startswith(f"here.idx is damaged at bytes {offset} to {offset + length}: ")

    @pytest.mark.parametrize(
        "data", [idx([3, 0, 5]), idx([3, 0, 5], modes=b"\0\1\0"), idx([3, 0, 5], bounds=[0, 3]), idx([], bounds=[0])]
    )
    def test_sound_files_are_read(self, data):
        found = parse_index(data, "here.idx", self.BIN_BYTES)
        assert found.lengths.tolist() == [3, 0, 5][: len(found.lengths)]
        assert found.lengths.flags.aligned and found.pointers.flags.aligned

    def test_the_old_format_is_refused(self):
        with pytest.raises(ValueError, match="old format"):
            parse_index(b"TNTIDX\0\0" + bytes(100), "here.idx", 0)

    def test_absurd_counts_allocate_nothing(self, tmp_path):
        path = write_pair(tmp_path, "a", [3], counts=(10**15, 10**15))
        with pytest.raises(CorruptData, match="1000000000000000 sequences"):
            Megatron(2).index([path])

    def test_no_mutation_gives_more_than_the_files_hold(self):
        """A mutation is refused as damage, or all that is found lies within the .bin file."""
        rng = random.Random(1)
        sound, outcomes = idx([3, 0, 5], modes=b"\0\1\0"), {"read": 0, "refused": 0}
        for _ in range(20_000):
            data = bytearray(sound)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(data))
                data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, data[at] ^ 1 << rng.randrange(8)])
            if rng.random() < 0.2:
                data = data[: rng.randrange(len(data) + 1)]
            try:
                dtype, lengths, pointers = parse_index(bytes(data), "here.idx", self.BIN_BYTES)
            except CorruptData as error:
                assert 0 <= error.offset <= error.offset + error.length <= max(len(data), 9)
                outcomes["refused"] += 1
            else:
                ends = pointers + lengths.astype(np.int64) * dtype.itemsize
                assert (pointers >= 0).all() and (lengths >= 0).all() and (ends <= self.BIN_BYTES).all()
                outcomes["read"] += 1
        assert min(outcomes.values()) > 50, outcomes


@pytest.mark.parametrize("seed", [None, 5])
def test_a_data_set_gives_the_windows_that_the_rules_say(tmp_path, seed):
    lengths = np.random.default_rng(1).integers(0, 60, 80).tolist()
    write_pair(tmp_path, "a", lengths)
    data = GDSDataset(tmp_path, 4, Megatron(seq_len=16, seed=seed), device="cpu", shuffle=False, drop_last=True)
    batches = list(data)
    assert {batch.dtype for batch in batches} == {torch.int64} and len(batches) > 10
    expected = windows_by_the_rules(lengths, 16, seed)
    assert [window for batch in batches for window in batch.tolist()] == expected[: 4 * len(batches)]
    assert data.stats()["bytes"]["page_cache"] + data.stats()["bytes"]["direct"] > 0


@pytest.mark.parametrize("direct", ["auto", "always"])
@pytest.mark.parametrize("code", [code for code, dtype in CODES.items() if dtype[0] != "f"])
def test_windows_in_pieces_are_widened_on_every_way(tmp_path, code, direct):
    lengths = np.random.default_rng(3).integers(0, 900, 80).tolist()
    write_pair(tmp_path, "a", lengths, code)
    require_direct(tmp_path / "a.bin")
    options = EngineOptions(direct=direct)
    data = GDSDataset(
        tmp_path, 4, Megatron(seq_len=500, seed=2), device="cpu", shuffle=False, reading=Reading(options=options)
    )
    found = torch.cat(list(data)[:-1])
    expected = np.array(windows_by_the_rules(lengths, 500, 2)[: len(found)]).astype(CODES[code])
    assert found.dtype == torch.int64 and len(found) > 50
    assert np.array_equal(found.numpy(), expected)
    assert data.stats()["bytes"]["direct" if direct == "always" else "page_cache"] >= expected.nbytes


def test_a_data_set_gives_each_window_once_whatever_its_shuffle(tmp_path):
    lengths = np.random.default_rng(2).integers(1, 60, 200).tolist()
    write_pair(tmp_path, "a", lengths)
    for shuffle in (True, "lanes"):
        data = GDSDataset(tmp_path, 4, Megatron(seq_len=8), device="cpu", shuffle=shuffle)
        found = [window for batch in data for window in batch.tolist()]
        expected = windows_by_the_rules(lengths, 8)
        assert found != expected and sorted(found) == sorted(expected)


def test_a_data_set_gives_sequences_as_ragged_tokens_and_refuses_short_windows(tmp_path):
    write_pair(tmp_path, "a", [3, 0, 5])
    (batch,) = GDSDataset(tmp_path, 3, device="cpu", shuffle=False)
    assert [one.tolist() for one in batch["tokens"].as_list()] == [[0, 1, 2], [], [3, 4, 5, 6, 7]]
    with pytest.raises(ValueError, match="drop_last"):
        GDSDataset(tmp_path, 1, Megatron(seq_len=2, drop_last=False), device="cpu")
