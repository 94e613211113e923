"""npz as data: rows of arrays and files as samples, compared with numpy, and damage."""

import io
import resource
import struct
import zipfile

import numpy as np
import pytest
import torch
from helpers import few_bytes_of_python, grouped, in_new_process
from shard_files import mutations
from test_formats import read

from gdsdata import GDSDataset
from gdsdata.errors import CorruptData
from gdsdata.formats import Npz, npz, recognise
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.parsers.zip_directory import USUAL_END_BYTES, read_directory


def write(path, **arrays) -> str:
    np.savez(path, **arrays)
    return str(path)


def npy(array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def batches_of(paths, format, batch_size: int = 4, **options) -> list:
    return list(GDSDataset(paths, batch_size, format, shuffle=False, device="cpu", **grouped(options)))


def assert_within(index, size_bytes: int) -> None:
    """Check that the extents of an index of one file lie in it."""
    if isinstance(index, FieldIndex):
        begins, ends = index.begin_bytes, index.begin_bytes + index.length_bytes
    else:
        begins, ends = index.base_bytes, index.base_bytes + len(index) * index.stride_bytes
    assert index.size_bytes[0] == size_bytes and (begins > 0).all() and (ends <= size_bytes).all()


class TestRows:
    @pytest.mark.parametrize("dtype", ["?", "u1", "<i2", ">i4", "<u8", "<f2", ">f8", "<c8", ">c16"])
    def test_rows_are_those_that_numpy_wrote(self, tmp_path, dtype):
        x = np.arange(30).reshape(5, 3, 2).astype(dtype)
        path = write(tmp_path / "a.npz", other=np.ones(3), x=x)
        rows = torch.cat(batches_of(path, Npz("rows", "x"))).numpy()
        assert rows.dtype == x.dtype.newbyteorder("=") and np.array_equal(rows, x)
        (batch,) = batches_of(path, Npz("rows", ("x",)), 5)
        assert np.array_equal(batch["x"].numpy(), x)

    def test_rows_run_through_the_files_in_order(self, tmp_path):
        arrays = [np.arange(count * 3).reshape(count, 3) + 100 * i for i, count in enumerate((4, 0, 1, 7))]
        paths = [write(tmp_path / f"{i}.npz", y=np.ones(i), x=x) for i, x in enumerate(arrays)]
        index = Npz("rows", array="x").index(paths)
        assert index.first_sample.tolist() == [0, 4, 4, 5, 12]
        assert np.array_equal(read(index, range(12)), np.concatenate(arrays))

    def test_rows_of_several_arrays_come_together(self, tmp_path):
        x, y = np.arange(18.0).reshape(9, 2), np.arange(9)
        batches = batches_of(write(tmp_path / "a.npz", x=x, y=y), Npz("rows", ("y", "x")))
        assert [list(batch) for batch in batches] == [["y", "x"]] * 3
        assert np.array_equal(torch.cat([batch["x"] for batch in batches]).numpy(), x)
        assert np.array_equal(torch.cat([batch["y"] for batch in batches]).numpy(), y)

    def test_rows_in_fortran_order_are_refused(self, tmp_path):
        path = write(tmp_path / "a.npz", x=np.ones((3, 2), order="F"))
        with pytest.raises(ValueError, match="'x' is in Fortran order.*ascontiguousarray"):
            Npz("rows", "x").index([path])


class TestFiles:
    def test_each_file_is_a_sample_of_all_its_arrays(self, tmp_path):
        chance = np.random.default_rng(0)
        arrays = [
            {
                "c": chance.random((2, 3, 4)),
                "fortran": np.asfortranarray(chance.random((2, 3, 4), np.float32)),
                "big": chance.integers(100, size=5).astype(">i4"),
                "one": np.array(i),
                "none": np.zeros((0, 3)),
                "big/fortran": np.asfortranarray(chance.random((2, 3))).astype(">f8"),
            }
            for i in range(6)
        ]
        paths = [write(tmp_path / f"{i}.npz", **one) for i, one in enumerate(arrays)]
        batches = batches_of(paths, None)
        assert len(batches) == 2 and batches[0].keys() == arrays[0].keys()
        for name in arrays[0]:
            got = torch.cat([batch[name] for batch in batches]).numpy()
            expected = np.stack([one[name] for one in arrays])
            assert got.dtype == expected.dtype.newbyteorder("=") and np.array_equal(got, expected), name

    def test_arrays_that_differ_along_the_first_axis_are_ragged_rows(self, tmp_path):
        arrays = [np.arange(count * 2.0).reshape(count, 2) for count in (3, 0, 5)]
        paths = [write(tmp_path / f"{i}.npz", x=x, y=x[:, 0]) for i, x in enumerate(arrays)]
        (batch,) = batches_of(paths, Npz())
        assert [one.tolist() for one in batch["x"].as_list()] == [x.tolist() for x in arrays]
        assert [one.tolist() for one in batch["y"].as_list()] == [x[:, 0].tolist() for x in arrays]

    def test_fortran_order_in_one_file_alone_is_refused(self, tmp_path):
        paths = [write(tmp_path / f"{i}.npz", x=np.ones((2, 3), order="CF"[i])) for i in range(2)]
        with pytest.raises(ValueError, match="unlike arrays named 'x': .*a?0.npz, .* in Fortran order in .*1.npz"):
            Npz().index(paths)

    def test_arrays_without_names_have_numpys(self, tmp_path):
        np.savez(tmp_path / "a.npz", np.arange(3), np.ones(2))
        (batch,) = batches_of(tmp_path / "a.npz", Npz())
        assert batch["arr_0"].tolist() == [[0, 1, 2]] and batch["arr_1"].tolist() == [[1, 1]]

    def test_files_that_were_saved_unlike_one_another_are_read_by_their_own_directories(self, tmp_path, monkeypatch):
        monkeypatch.setattr(npz, "_FILES_AT_ONCE", 1)  # each is compared with the one before
        paths = []
        for i, names in enumerate(["xyz", "zyx", "xyz", "xyza", "xyz"]):
            paths.append(write(tmp_path / f"{i}.npz", **{name: np.full(4, 100 * i + ord(name)) for name in names}))
        (batch,) = batches_of(paths, Npz("file", ("x", "y", "z")), 5)
        for name in "xyz":
            assert np.array_equal(batch[name].numpy(), [[100 * i + ord(name)] * 4 for i in range(5)])

    def test_a_file_that_is_like_the_one_before_is_not_parsed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(npz, "_FILES_AT_ONCE", 1)
        parsed = []
        read_arrays = npz._read_arrays
        monkeypatch.setattr(npz, "_read_arrays", lambda file, one: parsed.append(file.path) or read_arrays(file, one))
        arrays = [np.full(1000, i) for i in range(5)] + [np.full(999, 5), np.full(1000, 6, "f8")]
        paths = [write(tmp_path / f"{i}.npz", x=x, y=np.array(i)) for i, x in enumerate(arrays)]
        index = Npz("file", "x").index(paths[:5])
        assert parsed == paths[:1]
        assert index.begin_bytes[0] == index.begin_bytes[4] and (index.mtime_ns > 0).all()
        batches = batches_of(paths[:5], Npz("file", "x"), 5)
        assert np.array_equal(batches[0]["x"].numpy(), np.stack(arrays[:5]))
        parsed.clear()
        with pytest.raises(ValueError, match="unlike arrays named 'x': <i8 .* <f8"):
            Npz("file", "x").index(paths)
        assert parsed == [paths[0], paths[5], paths[6]]


class TestZip:
    def test_files_are_recognized_by_magic_and_name(self, tmp_path):
        assert recognise([write(tmp_path / "a.npz", x=np.ones(2))]) == Npz("file")
        torch.save({"x": torch.ones(2)}, tmp_path / "b.pt")
        with pytest.raises(ValueError, match="b.pt is a file of torch.save, which is not read"):
            recognise([str(tmp_path / "b.pt")])

    @pytest.mark.parametrize("comment_bytes", [0, 1, 30, USUAL_END_BYTES, 65535])
    def test_a_comment_may_follow_the_directory_whatever_it_says(self, tmp_path, comment_bytes):
        path = write(tmp_path / "a.npz", x=np.arange(4))
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = (b"PK\5\6" + bytes(18) + b"!" * 65535)[:comment_bytes]
        assert torch.cat(batches_of(path, Npz("rows", "x"))).tolist() == [0, 1, 2, 3]

    def test_many_members_make_a_directory_longer_than_the_usual_end(self, tmp_path):
        arrays = {f"array number {i}": np.full(3, i) for i in range(300)}
        (batch,) = batches_of(write(tmp_path / "a.npz", **arrays), Npz())
        assert [int(batch[name][0, 0]) for name in arrays] == list(range(300))

    def test_a_directory_of_more_than_64_mib_is_read(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
            for i in range(1040):
                member = zipfile.ZipInfo(f"{i}.npy")
                member.comment = b"c" * 0xFFFF
                file.writestr(member, npy(np.array([i])))
        assert len(Npz().index([str(tmp_path / "a.npz")]).fields) == 1040

    @pytest.mark.parametrize("limit", ["ZIP64_LIMIT", "ZIP_FILECOUNT_LIMIT"])
    def test_a_directory_of_64_bits_is_read(self, tmp_path, monkeypatch, limit):
        monkeypatch.setattr(zipfile, limit, 1)
        path = write(tmp_path / "a.npz", x=np.arange(4), y=np.ones(2))
        assert b"PK\6\6" in (tmp_path / "a.npz").read_bytes()
        assert torch.cat(batches_of(path, Npz("rows", "x"))).tolist() == [0, 1, 2, 3]

    def test_arrays_behind_four_gib_are_found(self, tmp_path):
        path = tmp_path / "a.npz"
        head = np.lib.format.header_data_from_array_1_0(np.empty(0, "u1")) | {"shape": (2**32 + 5,)}
        with zipfile.ZipFile(path, "w") as archive, archive.open("big.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, head)
            begin = file._fileobj.tell()
            npy_bytes = file._file_size
            file._fileobj.seek(2**32 + 5, 1)  # a hole, which takes no space
            file._file_size += 2**32 + 5
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("x.npy", npy(np.arange(3)))
        assert npy_bytes == 128
        index = Npz("rows", "big").index([str(path)])
        assert (int(index.base_bytes[0]), len(index)) == (begin, 2**32 + 5)
        assert torch.cat(batches_of(path, Npz("rows", "x"))).tolist() == [0, 1, 2]

    def test_members_that_are_no_arrays_are_passed_over(self, tmp_path):
        path = write(tmp_path / "a.npz", x=np.arange(4))
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("README", "text" * 100)
        (batch,) = batches_of(path, Npz())
        assert list(batch) == ["x"]

    @pytest.mark.parametrize("arguments", [("rows", "X"), ("file", "X"), ("rows", ("x", "X"))])
    def test_a_name_that_no_array_has_is_refused_with_those_that_there_are(self, tmp_path, arguments):
        path = write(tmp_path / "a.npz", x=np.arange(4), y=np.arange(4))
        with pytest.raises(ValueError, match=r"a\.npz has no array 'X', but \['x', 'y'\]"):
            Npz(*arguments).index([path])

    def test_a_header_longer_than_usual_is_read_whole(self, tmp_path):
        shape = (1,) * 40 + (3,)
        path = write(tmp_path / "a.npz", **{"x" * 300: np.arange(3).reshape(shape)})
        (batch,) = batches_of(path, Npz())
        assert batch["x" * 300].shape == (1, *shape)

    def test_compressed_arrays_are_refused_with_what_to_do_unless_others_are_wanted(self, tmp_path):
        np.savez_compressed(tmp_path / "a.npz", x=np.arange(100))
        path = str(tmp_path / "a.npz")
        with pytest.raises(ValueError, match=r"'x.npy' lie there as they are, for it is deflated.*with numpy.savez$"):
            Npz().index([path])
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("y.npy", npy(np.arange(4)))
        assert torch.cat(batches_of(path, Npz("rows", "y"))).tolist() == [0, 1, 2, 3]

    def test_pickles_and_records_are_refused(self, tmp_path):
        path = write(tmp_path / "a.npz", x=np.array([{}, None]), y=np.ones(2))
        with pytest.raises(ValueError, match="'x.npy' at .*: it holds Python objects, a pickle"):
            Npz().index([path])
        assert len(Npz("file", "y").index([path])) == 1
        with pytest.raises(ValueError, match="it holds records"):
            Npz().index([write(tmp_path / "b.npz", x=np.zeros(2, "i4,f4"))])


class TestDamage:
    @pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "x\0y"])
    def test_a_name_that_leads_out_of_a_folder_is_corrupt(self, tmp_path, name):
        path = tmp_path / "a.npz"
        write(path, **{"n" * len(name): np.ones(2)})
        path.write_bytes(path.read_bytes().replace(b"n" * len(name), name.encode()))
        with pytest.raises(CorruptData, match="leads out of a folder") as caught:
            Npz().index([str(path)])
        assert caught.value.path == str(path) and caught.value.offset > 0

    @pytest.mark.parametrize("keep", [0, 1, 21, 100, -1])
    def test_a_file_that_was_cut_short_is_corrupt(self, tmp_path, keep):
        path = tmp_path / "a.npz"
        write(path, x=np.arange(1000))
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CorruptData, match="does not end as a zip does") as caught:
            Npz().index([str(path)])
        assert caught.value.path == str(path)

    @pytest.mark.parametrize("keep", [0, 100])
    def test_a_file_that_becomes_shorter_while_it_is_read_is_corrupt(self, tmp_path, keep):
        content = bytes(keep)
        with pytest.raises(CorruptData, match="has become shorter while it was read") as caught:
            read_directory(lambda offset, length: content[offset : offset + length], "a.npz", 200_000)
        assert caught.value.path == "a.npz"

    def test_names_that_come_twice_are_corrupt(self, tmp_path):
        path = tmp_path / "a.npz"
        write(path, x=np.ones(2), y=np.ones(2))
        path.write_bytes(path.read_bytes().replace(b"y.npy", b"x.npy"))
        with pytest.raises(CorruptData, match="a name twice"):
            Npz().index([str(path)])

    def test_a_header_that_says_more_or_less_than_its_member_has_is_corrupt(self, tmp_path):
        path = tmp_path / "a.npz"
        write(path, x=np.arange(8), y=np.arange(100))
        whole = path.read_bytes()
        for rows in (7, 9):
            path.write_bytes(whole.replace(b"(8,)", b"(%d,)" % rows))
            said = f"'x.npy' says {8 * rows} bytes of data behind 128, and all of it has 192"
            with pytest.raises(CorruptData, match=said):
                Npz("file", "x").index([str(path)])

    def test_an_entry_that_leads_to_another_member_is_corrupt(self, tmp_path):
        path = tmp_path / "a.npz"
        write(path, x=np.arange(8), y=np.arange(8))
        data = path.read_bytes()
        first, second = (data.index(b"PK\1\2"), data.rindex(b"PK\1\2"))
        offset = slice(second + 42, second + 46)
        assert data[offset] != data[first + 42 : first + 46]
        path.write_bytes(data[: offset.start] + data[first + 42 : first + 46] + data[offset.stop :])
        with pytest.raises(CorruptData, match="there is no header of 'y.npy'") as caught:
            Npz().index([str(path)])
        assert (caught.value.path, caught.value.offset) == (str(path), 0)

    @pytest.mark.parametrize(
        ("at", "value"),
        [(8, b"\xfe\xff"), (10, b"\xfe\xff"), (12, b"\xfe\xff\xff\xff"), (16, b"\xfe\xff\xff\xff"), (12, bytes(4))],
    )
    def test_an_end_that_lies_is_corrupt_and_takes_no_memory(self, tmp_path, at, value):
        path = tmp_path / "a.npz"
        write(path, x=np.arange(8))
        data = bytearray(path.read_bytes())
        end = len(data) - 22
        data[end + at : end + at + len(value)] = value
        path.write_bytes(data)
        with few_bytes_of_python(2**20):
            try:
                index = Npz().index([str(path)])
                assert at == 8  # the number of entries on this disk; there is one disk
                assert_within(index, len(data))
            except CorruptData as error:
                assert error.path == str(path) and "its directory" in str(error)

    def test_a_directory_of_64_bits_that_lies_takes_no_memory(self, tmp_path):
        path = tmp_path / "a.npz"
        end64 = struct.pack("<4s28xQQQ", b"PK\6\6", 2**40, 46 * 2**40, 0)
        locator = struct.pack("<4s4xQ4x", b"PK\6\7", 46 * 2**40)
        end = struct.pack("<4s6xHIIH", b"PK\5\6", 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        with open(path, "wb") as file:
            file.seek(46 * 2**30)  # a hole
            file.write(end64 + locator + end)
        for offset in (46 * 2**40, 46 * 2**30):
            with open(path, "r+b") as file:
                file.seek(46 * 2**30 + 32)
                file.write(struct.pack("<QQ", 2**30, 46 * 2**30) + bytes(8))
                file.write(struct.pack("<4s4xQ4x", b"PK\6\7", offset))
            error = "64-bit end of its directory is not there|its directory cannot be"
            with few_bytes_of_python(2**20), pytest.raises(CorruptData, match=error):
                Npz().index([str(path)])

    @pytest.mark.parametrize("seed", range(4))
    def test_no_damage_makes_an_extent_leave_its_file(self, tmp_path, monkeypatch, seed):
        monkeypatch.setattr(npz, "_FILES_AT_ONCE", 1)
        path, whole = tmp_path / "a.npz", tmp_path / "0.npz"
        write(path, x=np.arange(12).reshape(4, 3), y=np.arange(4))
        whole.write_bytes(path.read_bytes())
        outcomes = set()
        for damaged in mutations(path.read_bytes(), seed, 200):
            path.write_bytes(damaged)
            for format in (Npz("rows", "x"), Npz("rows", ("x", "y")), Npz()):
                try:
                    assert_within(format.index([str(path)]), len(damaged))
                    outcomes.add("read")
                except ValueError as error:
                    outcomes.add(type(error).__name__)
                    with pytest.raises(ValueError):  # a sound file before it does not hide the damage
                        format.index([str(whole), str(path)])
        assert {"read", "CorruptData"} <= outcomes <= {"read", "CorruptData", "ValueError"}


class TestVerify:
    """With ``verify``, arrays are compared with the zip's checksums when they are indexed."""

    def test_damaged_values_are_named_with_path_member_and_offset(self, tmp_path):
        path = tmp_path / "a.npz"
        values = np.arange(3_000_000, dtype="u1").reshape(1000, 3000)  # more than is read at a time
        write(path, y=np.ones(4), x=values)
        sound = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo("x.npy")
        begin = sound.index(b"\x93NUMPY", member.header_offset)
        for at in (begin + 128, begin + 2_000_000, begin + member.file_size - 1):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
            assert len(Npz("rows", "x").index([str(path)])) == 1000, "only verify=True looks"
            for format in (Npz(verify=True), Npz("rows", "x", verify=True), Npz("rows", ("x",), verify=True)):
                with pytest.raises(CorruptData, match=r"'x.npy' of .* checksum .*write or copy") as caught:
                    format.index([str(path)])
                assert (caught.value.path, caught.value.offset) == (str(path), begin)
                assert caught.value.length == member.file_size
            assert len(Npz("file", ("y",), verify=True).index([str(path)])) == 1, "x is not read, so it is not verified"

    def test_each_of_many_equal_files_is_compared(self, tmp_path):
        paths = [write(tmp_path / f"{i}.npz", x=np.full(9, i)) for i in range(5)]
        assert len(Npz(verify=True).index(paths)) == 5
        data = bytearray((tmp_path / "3.npz").read_bytes())
        data[data.index(b"\x93NUMPY") + 130] ^= 1
        (tmp_path / "3.npz").write_bytes(data)
        assert len(Npz().index(paths)) == 5
        with pytest.raises(CorruptData, match="3.npz: 'x.npy'"):
            Npz(verify=True).index(paths)

    def test_no_changed_bit_gives_other_values(self, tmp_path):
        """A changed bit is refused or does no harm, be it in a header, a checksum or a value."""
        path = tmp_path / "a.npz"
        values = np.arange(6, dtype="<i4")
        write(path, x=values)
        sound, read_ones = path.read_bytes(), 0
        for at in range(len(sound)):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
            try:
                index = Npz("rows", "x", verify=True).index([str(path)])
            except ValueError as error:
                assert str(path) in str(error)
            else:
                assert np.array_equal(read(index, range(6)), values), f"the bit at {at} changed the values"
                read_ones += 1
        assert 0 < read_ones < 100


def samples_of_two_data_sets(folder: str) -> list[int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    data_sets = [GDSDataset(folder, 50, Npz(array=name), device="cpu") for name in ("x", "y")]
    return [sum(len(batch[name]) for batch in one) for name, one in zip(("x", "y"), data_sets, strict=True)]


def test_more_files_are_indexed_than_may_be_open(tmp_path):
    for i in range(100):
        write(tmp_path / f"{i}.npz", x=np.arange(4) + i, y=np.arange(3.0) + i)
    assert in_new_process(samples_of_two_data_sets, str(tmp_path)) == [100, 100]
