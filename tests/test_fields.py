"""GDSDataset over samples with fields: the files' content, in every form, on every path."""

import dataclasses
import gc
import io
import os
import tarfile
import time
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from helpers import exit_code_of_fork, reading_threads, require_direct
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import gdsdata
from gdsdata import EngineOptions, Fields, GDSDataset, Ragged, Reading
from gdsdata.data.batches.fields import FieldReader
from gdsdata.data.batches.ragged import moved
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.errors import CorruptData, StallError
from gdsdata.formats.extents import Extents
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.parsers import tfrecord_records
from gdsdata.io import engine
from gdsdata.io.engine import crc32c_of_rows
from gdsdata.io.memory import MemoryPool

FIELDS = (Field("image"), Field("label", np.dtype("<i8"), ()), Field("points", np.dtype("<f4")))


class Lines:
    """A format for tests: adjacent samples with fields, whose `lengths` no file contains."""

    def __init__(self, lengths):
        self.lengths = lengths  # of each file: (n, 3)

    def index(self, paths):
        begins = [np.cumsum(np.maximum(one, 0)).reshape(one.shape) - np.maximum(one, 0) for one in self.lengths]
        status = [os.stat(path) for path in paths]
        return FieldIndex(
            paths,
            np.array([one.st_size for one in status]),
            np.array([one.st_mtime_ns for one in status]),
            np.cumsum([0, *map(len, self.lengths)]),
            FIELDS,
            Extents.of(np.concatenate(begins), np.concatenate(self.lengths)),
        )


def write(folder, counts, seed=0, most=5000):
    """Write files, and return (paths, lengths of each file's fields, samples as {field: bytes})."""
    rng = np.random.default_rng(seed)
    paths, lengths, samples = [], [], []
    for number, count in enumerate(counts):
        of_file = np.stack([rng.integers(0, most, count), np.full(count, 8), 4 * rng.integers(0, 40, count)], 1)
        content = rng.integers(0, 256, of_file.sum(), np.uint8).tobytes()
        paths.append(folder / f"{number:02}.bin")
        paths[-1].write_bytes(content)
        at = 0
        for of_sample in of_file.tolist():
            sample = {}
            for field, length in zip(FIELDS, of_sample, strict=True):
                sample[field.name] = content[at : at + length]
                at += length
            samples.append(sample)
        lengths.append(of_file)
    return list(map(str, paths)), lengths, samples


def given_back(batch):
    """Return the samples of a batch with `ragged="flat"`, as bytes."""
    images, points, labels = batch["image"].as_list(), batch["points"].as_list(), batch["label"]
    assert labels.dtype == torch.int64 and points[0].dtype == torch.float32 and images[0].dtype == torch.uint8
    parts = zip(images, labels, points, strict=True)
    return [
        {field.name: part.cpu().contiguous().numpy().tobytes() for field, part in zip(FIELDS, one, strict=True)}
        for one in parts
    ]


PATHS = {"default": EngineOptions(), "posix": EngineOptions(backend="posix"), "direct": EngineOptions(direct="always")}


@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS)
def test_each_sample_comes_once_an_epoch_bit_for_bit(tmp_path, options):
    paths, lengths, samples = write(tmp_path, [37, 0, 64, 5])
    data = GDSDataset(paths, 8, Lines(lengths), device="cpu", shuffle=True, reading=Reading(options=options))
    for _ in range(2):
        found = [sample for batch in data for sample in given_back(batch)]
        assert sorted(map(repr, found)) == sorted(map(repr, samples)) and found != samples


def test_the_order_of_the_files_is_kept_without_a_shuffle(tmp_path):
    paths, lengths, samples = write(tmp_path, [20, 9])
    data = GDSDataset(paths, 4, Lines(lengths), device="cpu", shuffle=False)
    batches = list(data)
    assert [sample for batch in batches for sample in given_back(batch)] == samples
    assert len(batches) == len(data) == 8 and len(batches[-1]["label"]) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 5))
@settings(deadline=None)
def test_offsets_are_those_of_the_samples(tmp_path_factory, counts, batch_size):
    folder = tmp_path_factory.mktemp("lines")
    paths, lengths, samples = write(folder, [*counts, 1], most=9)
    data = GDSDataset(
        paths, batch_size, Lines(lengths), device="cpu", shuffle=False, reading=Reading(options=EngineOptions())
    )
    assert [sample for batch in data for sample in given_back(batch)] == samples


def test_ragged_fields_come_as_they_are_asked_for(tmp_path):
    paths, lengths, samples = write(tmp_path, [6])
    images = [torch.tensor(list(sample["image"]), dtype=torch.uint8) for sample in samples]

    def batch(ragged):
        (found,) = GDSDataset(paths, 6, Lines(lengths), device="cpu", shuffle=False, fields=Fields(ragged=ragged))
        return found["image"]

    flat = batch("flat")
    assert isinstance(flat, Ragged) and torch.equal(flat.values, torch.cat(images))
    assert flat.offsets.tolist() == np.cumsum([0, *map(len, images)]).tolist()
    assert all(map(torch.equal, batch("list"), images)) and len(batch("list")) == 6
    assert all(map(torch.equal, batch("nested").unbind(), images))
    padded = batch("padded")
    assert padded.shape == (6, max(map(len, images)))
    for row, image in zip(padded, images, strict=True):
        assert torch.equal(row[: len(image)], image) and not row[len(image) :].any()
    with pytest.raises(ValueError, match="ragged='sparse'"):
        batch("sparse")


def test_a_field_that_a_sample_lacks_is_empty(tmp_path):
    paths, lengths, samples = write(tmp_path, [4])
    lengths[0][2, 0] = -1
    size = int(np.maximum(lengths[0], 0).sum())
    (tmp_path / "00.bin").write_bytes(bytes(size))
    (batch,) = GDSDataset(paths, 4, Lines(lengths), device="cpu", shuffle=False)
    assert batch["image"].offsets.diff()[2] == 0 and len(samples) == 4


def test_a_run_that_was_cut_goes_on_with_the_next_batch(tmp_path):
    paths, lengths, _ = write(tmp_path, [50])
    data = GDSDataset(paths, 4, Lines(lengths), device="cpu", seed=3)
    whole = [given_back(batch) for batch in data]
    first = GDSDataset(paths, 4, Lines(lengths), device="cpu", seed=3)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    state = first.state_dict()
    again = GDSDataset(paths, 4, Lines(lengths), device="cpu", seed=3)
    again.load_state_dict(state)
    assert [given_back(batch) for batch in again] == whole[5:]


def test_a_truncated_file_is_an_error_and_is_read_once_it_is_whole_again(tmp_path):
    paths, lengths, samples = write(tmp_path, [30])
    data = GDSDataset(paths, 4, Lines(lengths), device="cpu", shuffle=False)
    content = (tmp_path / "00.bin").read_bytes()
    os.truncate(paths[0], len(content) // 2)
    with pytest.raises(CorruptData, match=r"00\.bin"):
        list(data)
    (tmp_path / "00.bin").write_bytes(content)
    assert [sample for batch in data for sample in given_back(batch)] == samples


def test_memory_in_flight_is_bounded_by_prefetch_and_counted(tmp_path):
    paths, lengths, samples = write(tmp_path, [64])
    data = GDSDataset(paths, 4, Lines(lengths), device="cpu", reading=Reading(prefetch=2))
    batches = iter(data)
    next(batches)
    stats = data.stats()
    largest = sorted((sum(map(len, sample.values())) for sample in samples), reverse=True)[:4]
    assert stats["ring_bytes"] == 2 * sum(largest) and stats["batches"] == 1
    list(batches)
    assert sum(data.stats()["bytes"].values()) == sum(len(part) for sample in samples for part in sample.values())


def test_breaking_off_ends_the_reading_threads(tmp_path):
    paths, lengths, _ = write(tmp_path, [200])
    before = reading_threads()
    for _ in range(20):
        batches = iter(GDSDataset(paths, 4, Lines(lengths), device="cpu"))
        next(batches)
        batches.close()
    assert reading_threads() <= before


@pytest.mark.gpu
def test_fields_come_to_a_gpu(tmp_path):
    paths, lengths, samples = write(tmp_path, [37, 64])
    data = GDSDataset(paths, 8, Lines(lengths), device="cuda", shuffle=False)
    batches = list(data)
    assert all(batch["image"].values.device.type == "cuda" for batch in batches)
    assert [sample for batch in batches for sample in given_back(batch)] == samples


@pytest.mark.gpu
def test_pinned_residency_is_refused_for_fields(tmp_path):
    paths, lengths, _ = write(tmp_path, [4])
    with pytest.raises(ValueError, match="samples of one size"):
        GDSDataset(paths, 2, Lines(lengths), device="cuda", reading=Reading(residency="pinned"))


CPU = torch.device("cpu")


class Members:
    """A format for tests: each sample has one field, ``name``, of these contents in one file."""

    def __init__(self, name, contents):
        self.name, self.lengths = name, np.array([[len(content)] for content in contents])

    def index(self, paths):
        (status,) = [os.stat(path) for path in paths]
        begins = np.cumsum(self.lengths, 0) - self.lengths
        seen = np.array([status.st_size]), np.array([status.st_mtime_ns])
        extents = Extents.of(begins, self.lengths)
        return FieldIndex(paths, *seen, np.array([0, len(begins)]), (Field(self.name),), extents)


def decoded(folder, contents, decode):
    (folder / "members").write_bytes(b"".join(contents))
    data = GDSDataset(
        folder / "members",
        len(contents),
        Members("x", contents),
        device="cpu",
        shuffle=False,
        fields=Fields(decode={"x": decode}),
    )
    (batch,) = data
    return batch["x"]


def npy(array):
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def test_classes_texts_and_json_are_decoded(tmp_path):
    classes = decoded(tmp_path, [b"3", b" 17\n", b"-1"], "cls")
    assert classes.dtype == torch.int64 and classes.tolist() == [3, 17, -1]
    assert decoded(tmp_path, ["grün".encode(), b""], "txt") == ["grün", ""]
    assert decoded(tmp_path, [b'{"a": [1]}', b"null"], "json") == [{"a": [1]}, None]


@pytest.mark.parametrize("dtype", ["<i8", ">f4"])
def test_npy_members_of_a_single_element_make_a_batch_of_one_dimension(tmp_path, dtype):
    found = decoded(tmp_path, [npy(np.array(i, dtype)) for i in range(3)], "npy")
    assert found.shape == (3,) and found.tolist() == [0, 1, 2]


def test_npy_members_are_stacked_where_they_are_alike(tmp_path):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, 4)).astype(">f4"), np.asfortranarray(rng.standard_normal((3, 4)).astype("f4"))]
    found = decoded(tmp_path, list(map(npy, arrays)), "npy")
    assert found.dtype == torch.float32 and np.array_equal(found.numpy(), np.stack(arrays).astype("f4"))
    one, other = decoded(tmp_path, [npy(np.arange(3)), npy(np.arange(4))], "npy")
    assert one.tolist() == [0, 1, 2] and other.tolist() == [0, 1, 2, 3]


def test_images_are_stacked_where_they_are_of_one_size(tmp_path):
    vision = pytest.importorskip("torchvision.io")
    images = [torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8) for _ in range(3)]
    encoded = [vision.encode_png(image).numpy().tobytes() for image in images]
    assert torch.equal(decoded(tmp_path, encoded, "image"), torch.stack(images))
    jpeg = vision.encode_jpeg(images[0])
    mixed = decoded(tmp_path, [encoded[0], vision.encode_jpeg(images[0][:, :16]).numpy().tobytes()], "image")
    assert torch.equal(mixed[0], images[0]) and mixed[1].shape == (3, 16, 30)
    assert torch.equal(decoded(tmp_path, [jpeg.numpy().tobytes()], "image")[0], vision.decode_image(jpeg))


def test_a_decoder_of_ones_own_gets_the_bytes_of_each_sample(tmp_path):
    assert decoded(tmp_path, [b"abc", b"", b"d"], lambda samples: [len(one) for one in samples]) == [3, 0, 1]


def test_record_stream_names_the_tensors_of_a_batch_that_are_on_a_gpu(monkeypatch):
    named = []
    monkeypatch.setattr(engine, "record_stream", lambda tensor, stream: named.append((tensor, stream)))
    with FakeTensorMode():
        image, text, label = (torch.empty(3, device="cuda") for _ in range(3))
    offsets = torch.tensor([0, 3])
    gdsdata.record_stream({"a": image, "b": Ragged(Ragged(text, offsets), offsets), "c": [label, "d"]}, 7)
    assert [stream for _, stream in named] == [7, 7, 7]
    assert all(one is other for (one, _), other in zip(named, (image, text, label), strict=True))
    with pytest.raises(ValueError, match="on cpu, which has no streams"):
        gdsdata.record_stream({"a": offsets}, 7)
    with pytest.raises(ValueError, match="a dict of no tensors"):
        gdsdata.record_stream({"a": ["text"]}, 7)


@pytest.mark.parametrize(
    ("contents", "decode"),
    [
        ([b"1", b"x"], "cls"),
        ([b"1", b"9" * 19], "cls"),
        ([b"1", b"9" * 400], "cls"),
        ([b"1", b"9" * 5000], "cls"),
        ([b"", b"\xff"], "txt"),
        ([b"{}", b"{"], "json"),
        ([npy(np.arange(3)), b"\x93NUMPY"], "npy"),
    ],
)
def test_a_sample_that_cannot_be_decoded_is_named_with_its_place(tmp_path, contents, decode):
    with pytest.raises(CorruptData, match="field 'x' of .* cannot be decoded") as raised:
        decoded(tmp_path, contents, decode)
    assert raised.value.path.endswith("members")
    assert (raised.value.offset, raised.value.length) == (len(contents[0]), len(contents[1]))


def test_the_name_of_a_class_read_as_its_number_names_the_decoder_of_text(tmp_path):
    with pytest.raises(CorruptData, match='b\'cat\'; "cls" is for numbers in digits, and "txt" for names of classes'):
        decoded(tmp_path, [b"cat"], "cls")


def test_a_field_that_a_sample_lacks_is_said_to_be_missing(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("a.cls", "a.txt", "b.txt"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"1"))
    found = GDSDataset(tmp_path / "a.tar", 2, shuffle=False, device="cpu", fields=Fields(decode={"cls": "cls"}))
    said = r"a.tar: the sample at offset 2560 has no field 'cls', .* Write the field, .*Fields\(collate="
    with pytest.raises(CorruptData, match=said) as raised:
        next(iter(found))
    assert (raised.value.offset, raised.value.length) == (2560, 0)


def test_mistakes_in_decode_are_errors_at_once(tmp_path):
    with pytest.raises(ValueError, match="decode='jpg'"):
        decoded(tmp_path, [b"1"], "jpg")
    with pytest.raises(ValueError, match="names 'y'"):
        GDSDataset(tmp_path / "members", 1, Members("x", [b"1"]), device="cpu", fields=Fields(decode={"y": "cls"}))


@pytest.mark.parametrize("decoder", ["cls", "txt", "json", "npy", "image"])
@pytest.mark.parametrize("values", [np.arange(3), np.float32(1), np.ones((2, 2), "f2")])
def test_a_named_decoder_of_numbers_is_refused_and_not_of_bytes(tmp_path, decoder, values):
    np.savez(tmp_path / "0.npz", x=values, y=np.frombuffer(b"12", np.uint8))
    with pytest.raises(ValueError, match=f"decode= names 'x', whose values are {values.dtype} already: .* leave it"):
        GDSDataset(tmp_path, 1, device="cpu", fields=Fields(decode={"x": decoder}))
    (batch,) = GDSDataset(tmp_path, 1, device="cpu", fields=Fields(decode={"x": len, "y": "cls"}))
    assert batch["x"] == 1 and batch["y"].tolist() == [12]


def test_collate_gets_samples_with_the_fields_that_they_have_and_its_result_is_the_batch(tmp_path):
    paths, lengths, samples = write(tmp_path, [9])
    lengths[0][2, 0] = -1
    content = np.random.default_rng(0).integers(0, 256, int(np.maximum(lengths[0], 0).sum()), np.uint8).tobytes()
    (tmp_path / "00.bin").write_bytes(content)
    index = Lines(lengths).index(paths)
    batches = list(
        GDSDataset(paths, 4, Lines(lengths), device="cpu", shuffle=False, fields=Fields(collate=lambda some: some))
    )
    assert [len(batch) for batch in batches] == [4, 4, 1]
    for i, sample in enumerate(one for batch in batches for one in batch):
        assert list(sample) == [field.name for k, field in enumerate(FIELDS) if lengths[0][i, k] >= 0]
        for k, field in enumerate(FIELDS):
            if field.name in sample:
                begin = index.begin_bytes[i, k]
                assert sample[field.name].contiguous().numpy().tobytes() == content[begin:][: lengths[0][i, k]]
    assert sample["label"].shape == () and sample["points"].dtype == torch.float32


def test_collate_gets_decoded_values_and_transform_what_it_made(tmp_path):
    contents = [b"3", b"1", b"2"]
    (tmp_path / "members").write_bytes(b"".join(contents))
    index = Members("x", contents)
    index.lengths[1] = -1
    made = []

    def collate(some):
        made.append(some)
        return [one.get("x", -1) for one in some], len(some)

    fields = Fields(decode={"x": "cls"}, collate=collate)
    arguments = dict(device="cpu", shuffle=False, transform=lambda batch: batch[1], fields=fields)
    data = GDSDataset(tmp_path / "members", 3, index, **arguments)
    assert list(data) == [3]
    assert [list(one) for one in made[0]] == [["x"], [], ["x"]] and int(made[0][0]["x"]) == 3


def test_a_decoder_that_makes_one_thing_of_many_samples_cannot_be_collated(tmp_path):
    (tmp_path / "members").write_bytes(b"ab")
    format = Members("x", [b"a", b"b"])
    decode = {"x": lambda samples: len(samples)}
    with pytest.raises(ValueError, match="decoder of field 'x' made int of 2"):
        list(GDSDataset(tmp_path / "members", 2, format, device="cpu", fields=Fields(decode=decode, collate=list)))


def test_samples_of_one_size_refuse_collate_and_name_transform(tmp_path):
    np.arange(8).tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="one tensor already, and transform= gets that"):
        GDSDataset(tmp_path / "a.bin", 2, gdsdata.formats.Records("i8", ()), device="cpu", fields=Fields(collate=list))


def test_all_tensors_that_collate_returns_are_moved():
    pair = namedtuple("pair", ("a", "b"))
    batch = [{"x": torch.ones(2)}, (torch.ones(1), "name"), pair(torch.ones(1), 3)]
    found = moved(batch, torch.device("meta"))
    assert found[0]["x"].is_meta and found[1][0].is_meta and found[1][1] == "name"
    assert isinstance(found[2], pair) and found[2].a.is_meta and found[2].b == 3


def test_a_tar_of_a_folder_is_recognized_and_decoded(tmp_path):
    images = [np.full((4, 5), i, np.uint8) for i in range(20)]
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for i in range(10):
                number = 10 * shard + i
                for name, content in (("npy", npy(images[number])), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"train/{number:06}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    (tmp_path / "0.tar.idx").write_bytes(bytes(16))  # Energon's, and DALI's
    (tmp_path / "1.idx").write_bytes(b"v1.2 10\n")
    decode = {"npy": "npy", "cls": "cls"}
    data = GDSDataset(tmp_path, 4, device="cpu", seed=1, fields=Fields(decode=decode))
    found = {}
    for batch in data:
        assert batch["npy"].shape == (4, 4, 5)
        found.update(zip(batch["cls"].tolist(), batch["npy"], strict=True))
    assert sorted(found) == list(range(20))
    assert all(bool((image == number).all()) for number, image in found.items())


@pytest.mark.parametrize("kind", ["mds", "litdata", "megatron", "tfrecord", "tgz"])
def test_each_format_is_recognized_by_the_file_that_names_the_others(tmp_path, kind):
    formats, named = gdsdata.formats, {}
    if kind in ("mds", "litdata"):
        key = {"mds": b'{"version": 2, "shards": []}', "litdata": b'{\n "config": {}, "chunks": []}'}[kind]
        named = {"index.json": key, "chunk-0-0.bin": b"x" * 20, "shard.00000.mds": b"x" * 20}
    elif kind == "megatron":
        named = {"a.bin": b"\0" * 64, "a.idx": b"MMIDIDX\0\0" + bytes(40)}
    elif kind == "tfrecord":
        length = (5).to_bytes(8, "little")
        crc = tfrecord_records.masked(crc32c_of_rows(np.frombuffer(length, "u1")[None]))
        named = {"train-00000-of-1": length + crc.astype("<u4").tobytes() + b"12345" + bytes(4)}
    else:
        named = {"a.tar.gz": b"\x1f\x8b" + bytes(30)}
    for name, content in named.items():
        (tmp_path / name).write_bytes(content)
    paths = sorted(str(path) for path in tmp_path.iterdir())
    expected = {
        "mds": formats.Mds, "litdata": formats.LitData, "megatron": formats.Megatron, "tfrecord": formats.TFRecord,
        "tgz": formats.Tar,
    }  # fmt: skip
    assert type(formats.recognise(paths)) is expected[kind]
    if kind == "tgz":
        with pytest.raises(ValueError, match="gzip"):
            formats.recognise(paths).index(paths)


@pytest.mark.parametrize("shuffle", ["lanes", "uniform", "auto", False])
def test_every_shuffle_gives_every_sample_of_every_file_once(tmp_path, shuffle):
    paths, lengths, samples = write(tmp_path, [130, 0, 75, 300])
    data = GDSDataset(paths, 4, Lines(lengths), device="cpu", shuffle=shuffle)
    found = [sample for batch in data for sample in given_back(batch)]
    assert sorted(map(repr, found)) == sorted(map(repr, samples))
    assert (found == samples) is (shuffle is False)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
@settings(deadline=None)
def test_runs_cover_the_bytes_of_their_samples(tmp_path_factory, counts, drawn):
    paths, lengths, _ = write(tmp_path_factory.mktemp("runs"), [*counts, 1], most=9)
    index = Lines(lengths).index(paths)
    first = drawn.draw(st.integers(0, len(index) - 1))
    count = drawn.draw(st.integers(1, len(index) - first))
    covered = {(file, at) for file, begin, size in index.runs(first, count) for at in range(begin, begin + size)}
    _, files, begins, sizes, _ = index.plan(np.arange(first, first + count))
    for file, at, length in zip(files, begins.tolist(), sizes.tolist(), strict=True):
        assert length <= 0 or {(file, at), (file, at + length - 1)} <= covered


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">c8", "<f8"])
def test_values_of_either_byte_order_come_as_they_are(tmp_path, dtype):
    values = np.arange(12).astype(dtype)
    (tmp_path / "members").write_bytes(values.tobytes())
    index = Members("x", [values[:8].tobytes(), values[8:].tobytes()]).index([str(tmp_path / "members")])
    index = dataclasses.replace(index, fields=(Field("x", np.dtype(dtype)),))
    found = next(iter(GDSDataset(tmp_path / "members", 2, Fixed(index), device="cpu", shuffle=False)))["x"]
    assert found.values.tolist() == values.tolist() and found.offsets.tolist() == [0, 8, 12]


class Fixed:
    """A format for tests, of one index."""

    def __init__(self, index):
        self.found = index

    def index(self, paths):
        return self.found


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_a_stall_is_an_error_and_its_memory_is_kept(tmp_path, ends):
    (tmp_path / "x").write_bytes(bytes(8192))
    require_direct(tmp_path / "x")
    taken = []

    class NotedPool(MemoryPool):
        def take(self, size_bytes):
            memory = super().take(size_bytes)
            taken.append(weakref.ref(memory))
            return memory

    sizes = np.full((2, 1), 4096)
    index = FieldIndex(
        *([str(tmp_path / "x")], np.array([8192]), np.array([os.stat(tmp_path / "x").st_mtime_ns])),
        *(np.array([0, 2]), (Field("x"),), Extents.of(np.array([[0], [4096]]), sizes)),
    )
    late = EngineOptions(direct="always", workers=1, faults="late=1,late_ms=8000")
    shared = engine.shared_engine(late, CPU)
    settings = BatchSettings(CPU, dataclasses.replace(late, stall_timeout_s=0.05), prefetch=2)
    batches = FieldReader(index, settings, shared, engine.file_table(index), memory=NotedPool(4))
    batches.plan(np.arange(2), np.array([1, 1]), np.arange(2))
    while shared.statistics()["requests"] < 2:  # only memory of requests in flight must be kept
        time.sleep(0.01)
    with pytest.raises(StallError):
        batches.next()
    began = time.monotonic()
    if ends == "closed":
        batches.close()
        assert time.monotonic() - began < 4, "closing waited for what has stalled"
    del batches
    gc.collect()
    assert time.monotonic() - began < 7, "the stall was too short to judge"
    assert len(taken) == 2 and all(memory() is not None for memory in taken), "the engine still writes there"


def test_a_forked_child_does_not_wait_for_its_parents_reads(tmp_path):
    (tmp_path / "x").write_bytes(bytes(8192))
    require_direct(tmp_path / "x")
    shared = engine.shared_engine(EngineOptions(direct="always", workers=1, faults="late=1,late_ms=500"), CPU)
    target = torch.ones(8192, dtype=torch.uint8)
    begun = shared.begin_read(
        engine.table_of_one(str(tmp_path / "x")),
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
        np.full(1, 8192),
        target,
        np.zeros(1, np.int64),
        shared.mark(0),
    )
    assert exit_code_of_fork(lambda: begun.wait(20)) == 0
    assert begun.wait(20) and not target.any()


def test_reads_whose_result_is_dropped_release_their_memory(tmp_path):
    class Counted:
        """Memory of the tensor below, whose end is counted."""

        nbytes = 8192

        def data_ptr(self):
            return target.data_ptr()

    (tmp_path / "x").write_bytes(bytes(8192))
    table = engine.table_of_one(str(tmp_path / "x"))
    shared = engine.shared_engine(EngineOptions(), CPU)
    target = torch.ones(8192, dtype=torch.uint8)
    alive = []
    for taken in (False, True):
        memory = Counted()
        alive.append(weakref.ref(memory))
        begun = shared.begin_read(
            table,
            np.zeros(1, np.int32),
            np.zeros(1, np.int64),
            np.full(1, 8192),
            memory,
            np.zeros(1, np.int64),
            shared.mark(0),
        )
        del memory
        assert alive[-1]() is not None
        if taken:
            assert begun.wait(10) and begun.ended() and sum(begun.routes().values()) == 8192
            assert not target.any()
        else:
            del begun
        assert alive[-1]() is None


@pytest.mark.parametrize("seed", range(8))
def test_most_bytes_are_those_of_the_largest_samples(monkeypatch, seed):
    monkeypatch.setattr("gdsdata.formats.extents._AT_ONCE", 7)
    chosen = np.random.default_rng(seed)
    count, fields = int(chosen.integers(1, 60)), int(chosen.integers(1, 4))
    length_bytes = chosen.integers(-1, chosen.choice([1, 3, 50]), (count, fields))
    one = np.ones(1, np.int64)
    named = tuple(Field(str(i)) for i in range(fields))
    index = FieldIndex(["a"], one, one, np.array([0, count]), named, Extents.of(length_bytes, length_bytes))
    of_samples = np.sort(np.maximum(length_bytes, 0).sum(1))
    for samples in (1, count // 2 + 1, count, count + 5):
        assert index.most_bytes(samples) == of_samples[-samples:].sum()
