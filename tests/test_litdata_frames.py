"""LitData's shards with zstd inside: unpacked, they are plain ones."""

import io
import itertools
import struct

import numpy as np
import pytest
from helpers import few_bytes_of_python
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import edit_json, pack_shard, read_column, set_at
from test_litdata import write_plain

from gdsdata import GDSDataset
from gdsdata.errors import CorruptData
from gdsdata.formats import LitData, litdata_frames

zstandard = pytest.importorskip("zstandard")
pytestmark = pytest.mark.filterwarnings("ignore:gdsdata")


def framed(shard: bytes, frame_rows: int) -> bytes:
    """Compress a plain shard batch by batch, as LitData 0.2.76 does."""
    (samples,) = struct.unpack_from("<I", shard)
    offsets = np.frombuffer(shard, "<u4", samples + 1, 4)
    firsts = range(0, samples, frame_rows)
    ends = [min(first + frame_rows, samples) for first in firsts]
    pack = zstandard.ZstdCompressor().compress
    frames = [pack(shard[offsets[first] : offsets[end]]) for first, end in zip(firsts, ends, strict=True)]
    at = 24 + 4 * (samples + 1) + 24 * len(frames)
    table = b""
    for first, end, frame in zip(firsts, ends, frames, strict=True):
        table += struct.pack("<IIQII", first, end - first, at, len(frame), offsets[end] - offsets[first])
        at += len(frame)
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, samples, frame_rows, len(frames))
    return head + (offsets - offsets[0]).astype("<u4").tobytes() + table + b"".join(frames)


def framed_samples(shard: bytes) -> bytes:
    """Compress each sample of a plain shard, as LitData 0.2.76 does."""
    (samples,) = struct.unpack_from("<I", shard)
    offsets = np.frombuffer(shard, "<u4", samples + 1, 4).tolist()
    pack = zstandard.ZstdCompressor().compress
    return pack_shard([pack(shard[begin:end]) for begin, end in itertools.pairwise(offsets)])


def write_framed(folder, frame_rows=2):
    """Write `write_plain`'s samples so, and return the index.json and the texts.

    Args:
        folder: of the data set.
        frame_rows: samples a frame; 0: each by itself, with the level "sample".
    """
    path = write_plain(folder)
    texts = read_column(LitData().index([path]), "text")
    level = "batch" if frame_rows else "sample"
    for way, value in (("compression", "zstd"), ("compression_level", level), ("compression_batch_size", frame_rows)):
        edit_json(folder / "index.json", set_at(["config", way], value))
    for shard in folder.glob("chunk-0-?.bin"):
        plain = shard.read_bytes()
        shard.write_bytes(framed(plain, frame_rows) if frame_rows else framed_samples(plain))
    return path, texts


sizes = st.sampled_from([0, 1, 255, 256, 257, 65_791, 65_792, 70_000])  # of one byte, two and four


@given(
    st.lists(st.binary(max_size=200) | sizes.map(bytes), min_size=1, max_size=20),
    st.integers(0, 9),
    st.integers(1, 500),
)
@settings(max_examples=40, deadline=None)
def test_unpacked_bytes_are_those_of_the_plain_shard(samples, frame_rows, step):
    plain = pack_shard(samples)
    decompressor = zstandard.ZstdDecompressor
    stream = litdata_frames.unpacking(
        io.BytesIO(framed(plain, frame_rows) if frame_rows else framed_samples(plain)),
        litdata_frames.BATCH if frame_rows else litdata_frames.SAMPLE,
        lambda file: decompressor().stream_reader(file, read_across_frames=True, closefd=False),
    )
    assert b"".join(iter(lambda: stream.read(step), b"")) == plain


@pytest.mark.parametrize("frame_rows", [0, 1, 2, 256])
def test_samples_are_those_that_were_compressed(tmp_path, frame_rows):
    path, texts = write_framed(tmp_path / "data", frame_rows)
    for _ in range(2):
        index = LitData(unpacked=str(tmp_path / "kept")).index([path])
        assert read_column(index, "text") == texts and len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize("frame_rows, level", [(0, "sample"), (2, "batch")])
def test_shards_that_must_not_be_unpacked_are_refused(tmp_path, frame_rows, level):
    path, _ = write_framed(tmp_path, frame_rows)
    with pytest.raises(ValueError, match=f"compressed {level} by {level}.*unpacked=None: leave that out"):
        LitData(unpacked=None).index([path])


@pytest.mark.parametrize("frame_rows", [0, 2])
def test_a_shard_cut_short_anywhere_is_corrupt(tmp_path, frame_rows):
    path, _ = write_framed(tmp_path / "data", frame_rows)
    shard = tmp_path / "data" / "chunk-0-1.bin"
    sound = shard.read_bytes()
    for length in range(0, len(sound), 5):
        shard.write_bytes(sound[:length])
        with pytest.raises(CorruptData) as caught:
            LitData(unpacked=str(tmp_path / "kept")).index([path])
        assert caught.value.path == str(shard)
    data = GDSDataset(path, 5, LitData(unpacked=str(tmp_path / "kept")), device="cpu", on_error="skip")
    assert sum(len(batch["label"]) for batch in data) == 5


@pytest.mark.parametrize(
    "at, value, said", [(0, b"LDFZ02", "magic of"), (8, b"\2", "version 2"), (12, b"\6", "6 samples")]
)
def test_a_wrong_magic_version_or_count_in_a_head_is_corrupt(tmp_path, at, value, said):
    path, _ = write_framed(tmp_path)
    shard = tmp_path / "chunk-0-0.bin"
    sound = shard.read_bytes()
    shard.write_bytes(sound[:at] + value + sound[at + len(value) :])
    with pytest.raises(CorruptData, match=said):
        LitData().index([path])


SAMPLE_AT = 4 * 7  # of `write_plain`'s five samples


@pytest.mark.parametrize(
    "at, value, said",
    [
        (0, b"\6", "6 samples"),
        (4, b"\1", "its table of offsets lies"),
        (8, b"\0", "its table of offsets lies"),
        (SAMPLE_AT, b"x", "sample 0 does not begin as zstd does"),
        (SAMPLE_AT + 4, b"\0", "sample 0 does not say its unpacked size"),
        (SAMPLE_AT + 4, b"\xe0" + b"\xff" * 8, "unpacked, it would have 4294967"),
    ],
)
def test_a_wrong_table_of_offsets_or_frame_of_a_sample_is_corrupt(tmp_path, at, value, said):
    path, _ = write_framed(tmp_path, 0)
    shard = tmp_path / "chunk-0-0.bin"
    sound = shard.read_bytes()
    shard.write_bytes(sound[:at] + value + sound[at + len(value) :])
    with few_bytes_of_python(2**20), pytest.raises(CorruptData, match=said):
        LitData().index([path])


def test_a_shard_that_is_not_there_is_named_with_its_index(tmp_path):
    path, _ = write_framed(tmp_path)
    (tmp_path / "chunk-0-1.bin").unlink()
    with pytest.raises(FileNotFoundError, match=f"{path} lists it"):
        LitData().index([path])
