"""`examples/nifti.py`: the volumes that it reads, and the errors that refuse a file."""

import gzip
import math
import os
import random
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from nifti import Nifti, is_nifti

from gdsdata import GDSDataset
from gdsdata.errors import CorruptData

# The codes of NIfTI-1, and numpy's names of them.
CODES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 32: "c8", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8"}
CODES |= {1280: "u8", 1792: "c16"}
CODE_OF = {name: code for code, name in CODES.items()}
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def volume(shape, dtype="i2", start=0):
    return (np.arange(math.prod(shape)) + start).astype(dtype).reshape(shape)


def nifti(array, order="<", **changes):
    """Pack a file field by field. ``changes`` replace fields of the header."""
    fields = {"sizeof_hdr": 348, "dim": [array.ndim, *array.shape], "datatype": CODE_OF[array.dtype.str[1:]]}
    fields |= {"bitpix": array.dtype.itemsize * 8, "pixdim": [1.0] * 8, "vox_offset": 352.0, "scl_slope": 0.0}
    fields |= {"scl_inter": 0.0, "magic": b"n+1\0"}
    fields |= changes
    head = bytearray(348)
    struct.pack_into(f"{order}i", head, 0, fields["sizeof_hdr"])
    struct.pack_into(f"{order}8h", head, 40, *(fields["dim"] + [1] * 8)[:8])
    struct.pack_into(f"{order}hh", head, 70, fields["datatype"], fields["bitpix"])
    struct.pack_into(f"{order}8f", head, 76, *fields["pixdim"])
    struct.pack_into(f"{order}fff", head, 108, *(fields[name] for name in ("vox_offset", "scl_slope", "scl_inter")))
    head[344:348] = fields["magic"]
    gap = bytes(int(fields["vox_offset"]) - 348) if 348 <= fields["vox_offset"] < 1e6 else bytes(4)
    return bytes(head) + gap + array.astype(array.dtype.newbyteorder(order)).tobytes(order="F")


def write(path, content):
    path.write_bytes(content)
    return str(path)


def read(source, format=None):
    """Return all samples of a data set, in the order of its files."""
    batches = GDSDataset(source, 2, format, shuffle=False, device="cpu")
    return torch.cat(list(batches)).numpy()


class TestVolumes:
    @pytest.mark.parametrize("order", "<>")
    @pytest.mark.parametrize("dtype", CODES.values())
    def test_each_dtype_and_byte_order_comes_as_it_was_written(self, tmp_path, order, dtype):
        volumes = [volume((4, 3, 2), dtype, start) for start in (0, 60, 100)]
        paths = [write(tmp_path / f"{i}.nii", nifti(array, order)) for i, array in enumerate(volumes)]
        batch = read(paths)
        assert batch.dtype == np.dtype(dtype) and (batch == np.stack(volumes)).all()

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=7), st.sampled_from("<>"), st.integers(1, 3))
    @many
    def test_any_shape_and_number_of_files_is_read(self, tmp_path, shape, order, count):
        volumes = [volume(shape, "f4", 7 * i) for i in range(count)]
        paths = [write(tmp_path / f"{i}.nii", nifti(array, order)) for i, array in enumerate(volumes)]
        assert (read(paths, Nifti()) == np.stack(volumes)).all()

    def test_complex_numbers_keep_both_parts_in_either_byte_order(self, tmp_path):
        values = np.array([[1 + 2j, -3.5j], [4, 5 - 6j]], "c8")
        for order in "<>":
            assert (read(write(tmp_path / "a.nii", nifti(values, order))) == values).all()

    def test_the_first_dimension_is_the_fastest_in_the_file(self, tmp_path):
        path = write(tmp_path / "a.nii", nifti(np.zeros((2, 3), "u1"))[:352] + bytes([0, 1, 2, 3, 4, 5]))
        assert read(path).tolist() == [[[0, 2, 4], [1, 3, 5]]]

    def test_files_may_differ_in_their_extensions(self, tmp_path):
        volumes = [volume((3, 2)), volume((3, 2), start=10)]
        write(tmp_path / "a.nii", nifti(volumes[0]))
        write(tmp_path / "b.nii", nifti(volumes[1], vox_offset=4096.0 + 16))
        assert (read(str(tmp_path)) == np.stack(volumes)).all()

    def test_sizes_behind_the_last_dimension_do_not_count(self, tmp_path):
        array = volume((3, 2))
        assert (read(write(tmp_path / "a.nii", nifti(array, dim=[2, 3, 2, 0, -1, 0, 9, 9]))) == array).all()

    def test_shuffled_epochs_and_a_resumed_one_have_the_same_volumes(self, tmp_path):
        for i in range(7):
            write(tmp_path / f"{i}.nii", nifti(np.full((2, 2), i, "i2")))

        def dataset():
            return GDSDataset(str(tmp_path / "*.nii"), 2, seed=3, device="cpu")

        whole = [batch[:, 0, 0].tolist() for batch in dataset()]
        assert sorted(sum(whole, [])) == list(range(7))
        first, second = dataset(), dataset()
        batches = iter(first)
        next(batches)
        second.load_state_dict(first.state_dict())
        assert [batch[:, 0, 0].tolist() for batch in second] == whole[1:]

    def test_nibabel_reads_the_same(self, tmp_path):
        nibabel = pytest.importorskip("nibabel")
        for dtype in ("u1", "i2", "f4", "f8", "u2", "c8"):
            for order in "<>":
                array = volume((4, 3, 2, 1), dtype)
                path = write(tmp_path / "ours.nii", nifti(array, order))
                assert (np.asanyarray(nibabel.load(path).dataobj) == read(path)[0]).all()
                head = nibabel.Nifti1Header(endianness=order)
                head.set_data_dtype(dtype)
                image = nibabel.Nifti1Image(array, np.eye(4), head)
                nibabel.save(image, tmp_path / "theirs.nii")
                result = read(str(tmp_path / "theirs.nii"))
                assert result.dtype == np.dtype(dtype) and (result[0] == array).all()
        image.header.extensions.append(nibabel.nifti1.Nifti1Extension(6, b"a comment"))
        nibabel.save(image, tmp_path / "extended.nii")
        assert (read(str(tmp_path / "extended.nii"))[0] == array).all()


class TestScaling:
    @pytest.mark.parametrize(("slope", "inter"), [(0.0, 0.0), (0.0, 5.0), (1.0, 0.0), (math.nan, math.nan)])
    def test_no_scaling_gives_the_stored_values(self, tmp_path, slope, inter):
        array = volume((3, 2))
        assert (read(write(tmp_path / "a.nii", nifti(array, scl_slope=slope, scl_inter=inter))) == array).all()

    @pytest.mark.parametrize(("slope", "inter"), [(2.0, 0.0), (1.0, -1024.0), (math.inf, 0.0), (1.0, math.nan)])
    def test_scaled_values_are_refused_unless_stored_ones_are_asked_for(self, tmp_path, slope, inter):
        array = volume((3, 2))
        path = write(tmp_path / "a.nii", nifti(array, scl_slope=slope, scl_inter=inter))
        with pytest.raises(ValueError, match=r"a.nii: its values are scaled .*raw=True") as caught:
            Nifti().index([path])
        assert not isinstance(caught.value, CorruptData)
        assert (read(path, Nifti(raw=True)) == array).all()


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sizeof_hdr": 347}, "does not begin as a NIfTI-1 header"),
            ({"magic": b"n+3\0"}, "does not begin as a NIfTI-1 header"),
            ({"dim": [0, 3, 2]}, "0 dimensions"),
            ({"dim": [8, 3, 2]}, "8 dimensions"),
            ({"dim": [-1, 3, 2]}, "-1 dimensions"),
            ({"dim": [2, 3, 0]}, r"\(3, 0\)"),
            ({"dim": [2, -3, -2]}, r"\(-3, -2\)"),
            ({"dim": [2, 3, 3]}, "364 bytes,.* end at 370"),
            ({"dim": [2, 3, 1]}, "364 bytes,.* end at 358"),
            ({"dim": [7] + [32767] * 7}, "364 bytes"),
            ({"bitpix": 8}, "16 bits a value, bitpix says 8"),
            ({"vox_offset": 348.0}, "348.0"),
            ({"vox_offset": 0.0}, "0.0"),
            ({"vox_offset": 352.5}, "352.5"),
            ({"vox_offset": -352.0}, "-352.0"),
            ({"vox_offset": math.nan}, "nan"),
            ({"vox_offset": math.inf}, "inf"),
            ({"vox_offset": 3e38}, r"begin at 3\S*e\+38,"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("order", "<>")
    def test_a_lying_header_is_corrupt_with_its_place(self, tmp_path, order, changes, message):
        path = write(tmp_path / "a.nii", nifti(volume((3, 2)), order, **changes))
        with pytest.raises(CorruptData, match=message) as caught:
            Nifti().index([path])
        assert caught.value.path == path and path in str(caught.value)
        assert (caught.value.offset, caught.value.length) == (0, 348)
        assert "write or copy it again" in str(caught.value)

    @pytest.mark.parametrize("order", "<>")
    def test_a_file_cut_anywhere_is_corrupt(self, tmp_path, order):
        whole = nifti(volume((3, 2)), order)
        for length in range(len(whole)):
            path = write(tmp_path / "a.nii", whole[:length])
            with pytest.raises(CorruptData) as caught:
                Nifti().index([path])
            assert caught.value.path == path and path in str(caught.value)

    def test_a_volume_of_no_values_is_corrupt_even_in_a_file_of_that_size(self, tmp_path):
        path = write(tmp_path / "a.nii", nifti(np.zeros((3, 0), "i2")))
        with pytest.raises(CorruptData, match=r"2 dimensions, of \(3, 0\)"):
            Nifti().index([path])

    def test_bytes_behind_the_volume_are_corrupt(self, tmp_path):
        path = write(tmp_path / "a.nii", nifti(volume((3, 2))) + b"x")
        with pytest.raises(CorruptData, match="365 bytes"):
            Nifti().index([path])

    @given(st.integers(0, 2**32), st.sampled_from("<>"))
    @settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_mutated_header_is_read_within_the_file_or_refused_with_its_path(self, tmp_path, seed, order):
        chance = random.Random(seed)
        content = bytearray(nifti(volume((3, 2)), order))
        for _ in range(chance.randint(1, 4)):
            content[chance.choice([*range(4), *range(40, 124), *range(344, 348)])] = chance.randrange(256)
        path = write(tmp_path / "a.nii", bytes(content))
        try:
            index = Nifti().index([path])
        except ValueError as error:
            assert path in str(error)
            return
        assert index.base_bytes[0] + index.sample.bytes == os.path.getsize(path)
        assert read(path, Nifti()).shape == (1, *index.sample.shape)

    @pytest.mark.parametrize(
        ("code", "name"), [(1, "binary"), (128, "RGB24"), (1536, "float128"), (2304, "RGBA32"), (77, "77")]
    )
    def test_a_datatype_that_is_not_supported_is_named(self, tmp_path, code, name):
        path = write(tmp_path / "a.nii", nifti(volume((3, 2)), datatype=code))
        with pytest.raises(ValueError, match=rf"a.nii: .*datatype {code}\b.*convert") as caught:
            Nifti().index([path])
        assert not isinstance(caught.value, CorruptData)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.nii.gz", gzip.compress(nifti(volume((3, 2))), mtime=0), r"compressed.*gunzip"),
            ("a.nii", gzip.compress(nifti(volume((3, 2))), mtime=0), r"compressed.*gunzip"),
            ("a.hdr", nifti(volume((3, 2)), magic=b"ni1\0"), r"pair.*single"),
            ("a.nii", struct.pack("<i8s", 540, b"n+2\0\r\n\x1a\n").ljust(600, b"\0"), r"NIfTI-2.*NIfTI-1"),
            ("a.nii", struct.pack(">i8s", 540, b"n+2\0\r\n\x1a\n").ljust(600, b"\0"), r"NIfTI-2.*NIfTI-1"),
        ],
        ids=["gzip", "gzip under another name", "pair", "NIfTI-2", "NIfTI-2 in the other byte order"],
    )
    @pytest.mark.parametrize("format", [None, Nifti()], ids=["recognized", "named"])
    def test_a_relative_of_the_format_is_refused_with_a_remedy(self, tmp_path, name, content, message, format):
        path = write(tmp_path / name, content)
        with pytest.raises(ValueError, match=re.escape(path) + ".*" + message) as caught:
            GDSDataset(path, 1, format, device="cpu")
        assert not isinstance(caught.value, CorruptData)

    @pytest.mark.parametrize(
        "other",
        [
            nifti(volume((2, 3))),
            nifti(volume((3, 2, 1))),
            nifti(volume((3, 2), "f4")),
            nifti(volume((3, 2), "u2")),
            nifti(volume((3, 2)), ">"),
        ],
    )
    def test_a_file_unlike_the_first_is_refused_by_name(self, tmp_path, other):
        paths = [write(tmp_path / "a.nii", nifti(volume((3, 2)))), write(tmp_path / "b.nii", other)]
        with pytest.raises(ValueError, match=r"b.nii: .*a.nii.*give them apart") as caught:
            Nifti().index(paths)
        assert not isinstance(caught.value, CorruptData)


class TestDataSets:
    def test_damaged_files_are_skipped_and_named(self, tmp_path):
        for i in range(4):
            write(tmp_path / f"{i}.nii", nifti(np.full((2, 2), i, "i2")))
        write(tmp_path / "1.nii", nifti(np.zeros((2, 2), "i2"))[:-1])
        with pytest.warns(RuntimeWarning, match=r"1\.nii"):
            dataset = GDSDataset(str(tmp_path), 4, shuffle=False, device="cpu", on_error="skip")
        (batch,) = dataset
        assert batch[:, 0, 0].tolist() == [0, 2, 3]
        ((path, _, reason),) = dataset.stats()["skipped"]["named"]
        assert path == str(tmp_path / "1.nii") and "359 bytes" in reason

    def test_a_file_beside_the_volumes_is_named_with_a_remedy_that_works(self, tmp_path):
        write(tmp_path / "a.nii", nifti(volume((3, 2))))
        write(tmp_path / "a.json", b"{}")
        with pytest.raises(CorruptData, match=r'a\.json .*or read "folder/\*\.nii" alone'):
            GDSDataset(str(tmp_path), 1, Nifti(), device="cpu")
        assert len(read(str(tmp_path / "*.nii"))) == 1

    def test_other_files_are_not_recognized(self):
        for head in (b"", b"\x5c\x01\0\0", b"\x1f\x8b" + bytes(400), struct.pack("<i", 348).ljust(512, b"\0")):
            assert not is_nifti(head, "a.bin")
        assert is_nifti(nifti(volume((1,)))[:512], "a") and is_nifti(nifti(volume((1,)), ">")[:512], "a.img")
