"""Safetensors as data: rows of tensors and files as samples, beside its own library, and damage."""

import json
import struct

import numpy as np
import pytest
import torch
from helpers import few_bytes_of_python, grouped
from shard_files import assert_within_files, mutations
from test_formats import read

from gdsdata import GDSDataset
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import Npy, Safetensors, recognise
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.parsers.safetensors_header import DTYPES, PACKED

save_file = pytest.importorskip("safetensors.torch").save_file


def write(path, **tensors) -> str:
    save_file(tensors, path)
    return str(path)


def random_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Make a tensor with random bits; bools are valid."""
    chance = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=chance).bool()
    bits = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=chance)
    return bits.view(dtype).view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))


def batches_of(paths, format, batch_size: int = 4, **options) -> list:
    return list(GDSDataset(paths, batch_size, format, shuffle=False, device="cpu", **grouped(options)))


def header_of(tensors: dict, padding: int = 0) -> bytes:
    text = json.dumps(tensors).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text


GOOD = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}


class TestRows:
    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_rows_of_every_dtype_are_those_of_the_tensor(self, tmp_path, dtype):
        x = random_of(dtype, 10, 3, 2)
        path = tmp_path / "a.safetensors"
        (name,) = (name for name, known in DTYPES.items() if known == dtype)
        about = {"dtype": name, "shape": [10, 3, 2 * PACKED.get(name, 1)], "data_offsets": [1, 1 + x.nbytes]}
        odd = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}  # x lies at no multiple of its elements
        path.write_bytes(header_of({"x": about, "odd": odd}) + b"!" + x.view(torch.uint8).numpy().tobytes())
        assert same_bits(torch.cat(batches_of(path, Safetensors("rows", "x"))), x)

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64, torch.uint64]
    )
    def test_rows_are_those_that_the_formats_own_library_wrote(self, tmp_path, dtype):
        x = random_of(dtype, 10, 3, 2)
        path = write(tmp_path / "a.safetensors", a=torch.ones(1, dtype=torch.uint8), x=x)
        assert same_bits(torch.cat(batches_of(path, Safetensors("rows", "x"))), x)

    def test_rows_run_through_the_files_in_order(self, tmp_path):
        tensors = [torch.arange(count * 3).view(count, 3) + 100 * i for i, count in enumerate((4, 0, 1, 7))]
        paths = [write(tmp_path / f"{i}.safetensors", x=x, y=torch.ones(i)) for i, x in enumerate(tensors)]
        index = Safetensors("rows", tensor="x").index(paths)
        assert index.first_sample.tolist() == [0, 4, 4, 5, 12] and index.sample.shape == (3,)
        assert np.array_equal(read(index, range(12)), torch.cat(tensors).numpy())

    def test_rows_of_one_axis_are_single_elements(self, tmp_path):
        path = write(tmp_path / "a.safetensors", x=torch.arange(5.0))
        assert torch.equal(torch.cat(batches_of(path, Safetensors("rows", "x"))), torch.arange(5.0))

    def test_rows_of_several_tensors_come_together(self, tmp_path):
        images, labels = random_of(torch.bfloat16, 9, 2, 2), torch.arange(9)
        path = write(tmp_path / "a.safetensors", image=images[:5], label=labels[:5])
        other = write(tmp_path / "b.safetensors", image=images[5:], label=labels[5:], more=torch.zeros(3))
        batches = batches_of([path, other], Safetensors("rows", ("label", "image")))
        assert [list(batch) for batch in batches] == [["label", "image"]] * 3
        assert torch.equal(torch.cat([batch["label"] for batch in batches]), labels)
        assert same_bits(torch.cat([batch["image"] for batch in batches]), images)
        (batch,) = batches_of(path, Safetensors("rows", ("label",)), 5)  # a dict of one
        assert torch.equal(batch["label"], labels[:5])

    @pytest.mark.parametrize(
        ("tensors", "names", "message"),
        [
            ({"x": torch.ones(2)}, "y", r"has no array 'y', but \['x'\]"),
            ({"x": torch.tensor(1.0)}, "x", "'x' is a single element, which has no rows"),
            ({"x": torch.ones(3, 0)}, "x", r"rows of 'x', of shape \(3, 0\), have no bytes"),
            ({"x": torch.ones(3), "y": torch.ones(4)}, ("x", "y"), "'y' has 4 rows, and the array .* first 3"),
        ],
    )
    def test_tensors_without_such_rows_are_refused(self, tmp_path, tensors, names, message):
        with pytest.raises(ValueError, match=message):
            Safetensors("rows", names).index([write(tmp_path / "a.safetensors", **tensors)])

    @pytest.mark.parametrize("other", [torch.ones(4, 3), torch.ones(4, 2).double(), torch.ones(4, 2).to(torch.int32)])
    def test_files_of_unlike_rows_are_refused_with_both(self, tmp_path, other):
        paths = [write(tmp_path / "a.safetensors", x=torch.ones(1, 2)), write(tmp_path / "b.safetensors", x=other)]
        with pytest.raises(ValueError, match="unlike arrays named 'x': <f4 .* in .*a.safe.*, .* in .*b.safe"):
            Safetensors("rows", "x").index(paths)

    def test_bits_of_one_width_and_another_meaning_are_unlike(self, tmp_path):
        one, other = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.uint16)
        paths = [write(tmp_path / "a.safetensors", x=one), write(tmp_path / "b.safetensors", x=other)]
        with pytest.raises(ValueError, match="torch.bfloat16 of shape .* <u2 of shape"):
            Safetensors("rows", "x").index(paths)


class TestFiles:
    def test_each_file_is_a_sample_of_all_its_tensors(self, tmp_path):
        tensors = [
            {"x": random_of(torch.float8_e4m3fn, 2, 3), "one": torch.tensor(float(i)), "none": torch.ones(0, 4)}
            for i in range(6)
        ]
        paths = [write(tmp_path / f"{i}.safetensors", **one) for i, one in enumerate(tensors)]
        batches = batches_of(paths, None)
        assert len(batches) == 2
        for name in tensors[0]:
            got = torch.cat([batch[name] for batch in batches])
            assert same_bits(got, torch.stack([one[name] for one in tensors])), name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_tensors_that_differ_along_the_first_axis_are_ragged_rows(self, tmp_path, dtype):
        tensors = [random_of(dtype, count, 2, 3) for count in (3, 0, 5)]
        paths = [write(tmp_path / f"{i}.safetensors", x=x, n=torch.tensor(len(x))) for i, x in enumerate(tensors)]
        (batch,) = batches_of(paths, Safetensors("file"))
        assert batch["n"].tolist() == [3, 0, 5] and batch["x"].offsets.tolist() == [0, 3, 3, 8]
        assert all(map(same_bits, batch["x"].as_list(), tensors))
        (padded,) = batches_of(paths, Safetensors("file"), ragged="padded")
        assert padded["x"].shape == (3, 5, 2, 3) and same_bits(padded["x"][0, :3], tensors[0])
        (nested,) = batches_of(paths, Safetensors("file"), ragged="nested")
        assert all(map(same_bits, nested["x"].unbind(), tensors))

    def test_only_the_tensors_that_are_named_are_read(self, tmp_path):
        paths = [
            write(tmp_path / "a.safetensors", x=torch.ones(2), y=torch.ones(3)),
            write(tmp_path / "b.safetensors", x=torch.zeros(2), z=torch.ones(2, 2)),
        ]
        (batch,) = batches_of(paths, Safetensors("file", "x"))
        assert list(batch) == ["x"] and batch["x"].tolist() == [[1, 1], [0, 0]]
        with pytest.raises(ValueError, match=r"b.safetensors has no array 'y', but \['x', 'z'\]"):
            Safetensors("file").index(paths)
        with pytest.raises(ValueError, match="has no array 'z'"):
            Safetensors("file").index(paths[::-1])

    def test_a_tensor_more_than_in_the_first_file_is_refused(self, tmp_path):
        paths = [
            write(tmp_path / "a.safetensors", x=torch.ones(2)),
            write(tmp_path / "b.safetensors", x=torch.ones(2), y=torch.ones(2)),
        ]
        with pytest.raises(ValueError, match=r"has the arrays \['x', 'y'\], and .*a.safetensors \['x'\]: name those"):
            Safetensors().index(paths)

    @pytest.mark.parametrize("other", [torch.ones(2, 4), torch.ones(6), torch.tensor(1.0), torch.ones(2, 3, 1)])
    def test_shapes_that_values_would_not_show_are_refused(self, tmp_path, other):
        paths = [write(tmp_path / "a.safetensors", x=torch.ones(2, 3)), write(tmp_path / "b.safetensors", x=other)]
        with pytest.raises(ValueError, match=r"named 'x' have shapes such as \(2, 3\) and .* first axis alone"):
            Safetensors().index(paths)

    def test_a_file_of_no_tensors_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="a.safetensors has no arrays, so there is nothing to read"):
            Safetensors().index([write(tmp_path / "a.safetensors")])


class TestArguments:
    @pytest.mark.parametrize("given", [("row", "x"), ("rows",), ("rows", ()), ("rows", ("x", "x")), ("file", ())])
    def test_values_that_make_no_sense_are_refused(self, given):
        with pytest.raises(ValueError, match="mode=|tensor="):
            Safetensors(*given)

    def test_a_list_of_names_is_a_tuple(self):
        assert Safetensors("rows", ["x", "y"]) == Safetensors("rows", ("x", "y"))

    def test_files_are_recognized_by_name_or_by_header(self, tmp_path):
        named = write(tmp_path / "a.safetensors", x=torch.ones(2))
        (tmp_path / "weights").write_bytes(header_of({"x": GOOD}) + bytes(8))
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        assert recognise([named]) == recognise([str(tmp_path / "weights")]) == Safetensors("file")
        found = sorted(str(path) for path in tmp_path.glob("*safetensors*"))
        assert Safetensors().index(found).paths == [named]
        np.save(tmp_path / "b.npy", np.ones(2))
        assert recognise([str(tmp_path / "b.npy")]) == Npy("file")


class TestDamage:
    @pytest.mark.parametrize(
        ("header", "data_bytes", "message"),
        [
            ({"x": GOOD}, 7, "tensors end at"),
            ({"x": GOOD}, 9, "tensors end at"),
            ({"x": GOOD, "y": GOOD}, 8, "'y' does not begin where the one before ends"),
            ({"x": {**GOOD, "data_offsets": [4, 12]}}, 12, "'x' does not begin where the one before ends"),
            ({"x": {**GOOD, "data_offsets": [8, 0]}}, 8, "has -8 bytes"),
            ({"x": {**GOOD, "shape": [True, 2]}}, 8, "a size or an offset that is none"),
            ({"x": {**GOOD, "shape": [2**63, 0], "data_offsets": [0, 0]}}, 0, "a size or an offset that is none"),
            ({"x": {**GOOD, "shape": [1] * 65}}, 8, "has 65 axes"),
            ({"x": {**GOOD, "dtype": "F5"}}, 8, "which torch does not have"),
            ({"x": {**GOOD, "dtype": []}}, 8, "is not one of safetensors"),
            (["x"], 8, "is not one of safetensors"),
        ],
    )
    def test_a_header_that_lies_is_corrupt(self, tmp_path, header, data_bytes, message):
        path = tmp_path / "a.safetensors"
        path.write_bytes(header_of(header) + bytes(data_bytes))
        with pytest.raises(CorruptData, match=message) as caught:
            Safetensors("rows", "x").index([str(path)])
        assert caught.value.path == str(path) and 0 <= caught.value.offset <= path.stat().st_size

    @pytest.mark.parametrize("padding", [0, 3, 2000, 5000])
    def test_a_header_may_be_padded_and_long(self, tmp_path, padding):
        path = tmp_path / "a.safetensors"
        path.write_bytes(header_of({"x": GOOD}, padding) + np.array([1, 2], "<f4").tobytes())
        assert torch.cat(batches_of(path, Safetensors("rows", "x"))).tolist() == [[1.0], [2.0]]

    @pytest.mark.parametrize("length", [9, 99_000_000, 2**40, 2**64 - 1])
    def test_a_length_that_lies_takes_no_memory(self, tmp_path, length):
        path = tmp_path / "a.safetensors"
        path.write_bytes(struct.pack("<Q", length) + b"{" * min(8, length))
        error = f"says that its header has {length}"
        with few_bytes_of_python(2**20), pytest.raises(CorruptData, match=error):
            Safetensors().index([str(path)])

    def test_a_count_of_rows_that_have_no_bytes_takes_no_memory(self, tmp_path):
        path = tmp_path / "a.safetensors"
        path.write_bytes(header_of({"x": {**GOOD, "shape": [2**62, 0], "data_offsets": [0, 0]}}))
        for names in ("x", ("x",)):
            with pytest.raises(ValueError, match="have no bytes"):
                Safetensors("rows", names).index([str(path)])

    def test_a_missing_file_and_a_folder_are_errors(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            Safetensors().index([str(tmp_path / "none.safetensors")])
        with pytest.raises(IoError):
            Safetensors().index([str(tmp_path)])  # a folder

    @pytest.mark.parametrize("seed", range(3))
    def test_no_damage_makes_an_extent_leave_its_file(self, tmp_path, seed):
        path = tmp_path / "a.safetensors"
        write(path, x=torch.randn(4, 3), y=torch.arange(4), z=torch.ones(2, dtype=torch.bfloat16))
        outcomes = set()
        for damaged in mutations(path.read_bytes(), seed, 200):
            path.write_bytes(damaged)
            for format in (Safetensors("rows", "x"), Safetensors("rows", ("x", "y")), Safetensors()):
                try:
                    index = format.index([str(path)])
                    if isinstance(index, FieldIndex):
                        ends = (index.begin_bytes + index.length_bytes).max()
                    else:
                        ends = index.base_bytes[0] + len(index) * index.stride_bytes[0]
                    assert index.size_bytes[0] == len(damaged) and 0 < ends <= len(damaged)
                    outcomes.add("read")
                except ValueError as error:
                    outcomes.add(type(error).__name__)
        assert {"read", "CorruptData"} <= outcomes <= {"read", "CorruptData", "ValueError"}


def test_fields_lie_within_their_files_in_order(tmp_path):
    index = Safetensors().index([write(tmp_path / "a.safetensors", a=torch.ones(3), b=torch.ones(2, 2))])
    assert_within_files(index)
    assert index.fields == (Field("a", np.dtype("<f4"), (3,)), Field("b", np.dtype("<f4"), (2, 2)))
