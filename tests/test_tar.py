"""WebDataset's tar shards: the samples, the places of their fields, and refusals."""

import bz2
import gzip
import io
import itertools
import lzma
import os
import pwd
import random
import re
import struct
import tarfile
import threading
import time

import numpy as np
import pytest
from helpers import MIB, drop_cache, few_bytes_of_python, random_bytes, resident_pages, warm_cache
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdsdata import Fields, GDSDataset
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import tar
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.parsers.tar_members import Members, read_members
from gdsdata.formats.tar import Tar
from gdsdata.formats.tar_index import pack_members, unpack_members
from gdsdata.formats.tar_reading import dali_offsets, energon_offsets

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
every_format = pytest.mark.parametrize("kind", FORMATS)
# Hypothesis runs one test function many times with one tmp_path. Every example here overwrites its
# files.
many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GIB = 2**30
END = bytes(1024)


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **attributes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info, data


def pack(members, kind: str = "pax") -> bytes:
    """Make a tar of pairs (name or TarInfo, bytes)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=FORMATS[kind]) as archive:
        for info, data in members:
            if isinstance(info, str):
                # As in webdataset's writer: a fraction in the time puts a pax header before every
                # member.
                info, data = member(info, data, mtime=1700000000.25 if kind == "pax" else 0)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def shard(path, members, kind: str = "pax") -> str:
    path.write_bytes(pack(members, kind))
    return str(path)


def header(name: str = "a.bin", size: int = 0, kind: str = "gnu", **attributes) -> bytes:
    """Make a member's header with any values."""
    info, _ = member(name, **attributes)
    info.size = size
    return info.tobuf(FORMATS[kind])


def extended(kind: bytes, payload: bytes) -> bytes:
    """Make a header for the next member: "x" and "g" hold pax records, "L" a name."""
    return header("extended", len(payload), type=kind) + payload.ljust(512, b"\0")


def with_checksum(record: bytes, signed: bool = False) -> bytes:
    """Return a changed header with its right checksum."""
    record = record[:148] + b" " * 8 + record[156:]
    total = sum(struct.unpack("512b", record)) if signed else sum(record)
    return record[:148] + b"%06o\0 " % total + record[156:]


def parse(content: bytes) -> Members:
    return read_members(lambda length, offset: content[offset : offset + length], len(content), "x.tar")


def index(*paths: str, fields=None) -> FieldIndex:
    return Tar(fields, index_cache=None).index(list(paths))


def read(found: FieldIndex) -> list[dict[str, bytes]]:
    """Read every sample by its extents alone."""
    samples = []
    plan, shape = found.plan(np.arange(len(found))), (len(found), len(found.fields))
    columns = plan.source.reshape(shape)[:, 0], plan.offset.reshape(shape), plan.length.reshape(shape)
    for file, begins, lengths in zip(*columns, strict=True):
        sample = {}
        with open(found.paths[file], "rb") as stream:
            for field, begin, length in zip(found.fields, begins.tolist(), lengths.tolist(), strict=True):
                if length >= 0:
                    stream.seek(begin)
                    sample[field.name] = stream.read(length)
                    assert len(sample[field.name]) == length
        samples.append(sample)
    return samples


def as_webdataset_groups(content: bytes) -> list[dict[str, bytes]]:
    """Return the samples of a tar by Python's tarfile and webdataset's rules."""
    samples, key = [], None
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for info in archive:
            match = re.match(r"((?:.*/|)[^./]+)[.]([^/]*)$", info.name, re.DOTALL)
            if not info.isreg() or not match or re.match(r"__[^/]*__($|/)", info.name):
                continue
            if match[1] != key:
                key = match[1]
                samples.append({})
            assert match[2].lower() not in samples[-1]
            samples[-1][match[2].lower()] = archive.extractfile(info).read()
    return samples


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path_factory, monkeypatch):
    """Give each test a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


class TestSamples:
    @every_format
    def test_a_sample_is_the_members_of_one_key(self, tmp_path, kind):
        images = [random_bytes(size, seed=size) for size in (0, 1, 511, 512, 513, 40_000)]
        members = [pair for i, jpg in enumerate(images) for pair in ((f"{i:06}.jpg", jpg), (f"{i:06}.cls", b"%d" % i))]
        found = index(shard(tmp_path / "a.tar", members, kind))
        assert [field.name for field in found.fields] == ["jpg", "cls"]
        assert all(field.dtype is None and field.shape is None for field in found.fields)
        assert read(found) == [{"jpg": jpg, "cls": b"%d" % i} for i, jpg in enumerate(images)]
        assert found.begin_bytes.dtype == found.length_bytes.dtype == np.int64

    def test_samples_run_through_the_files_and_keys_do_not(self, tmp_path):
        paths = [
            shard(tmp_path / "a.tar", [("0.txt", b"a0"), ("1.txt", b"a1")]),
            shard(tmp_path / "b.tar", []),
            shard(tmp_path / "c.tar", [("1.txt", b"c1")]),
        ]
        found = index(*paths)
        assert found.first_sample.tolist() == [0, 2, 2, 3]
        assert read(found) == [{"txt": b"a0"}, {"txt": b"a1"}, {"txt": b"c1"}]
        assert found.size_bytes.tolist() == [os.path.getsize(path) for path in paths]
        assert found.mtime_ns.tolist() == [os.stat(path).st_mtime_ns for path in paths]

    def test_the_key_ends_at_the_first_dot_of_the_name_and_not_of_the_path(self, tmp_path):
        members = [("v1.0/x.seg.PNG", b"1"), ("v1.0/x.Json", b"2"), ("v1.0/y.json", b"3"), ("./y.json", b"4")]
        assert read(index(shard(tmp_path / "a.tar", members))) == [
            {"seg.png": b"1", "json": b"2"},
            {"json": b"3"},
            {"json": b"4"},
        ]

    def test_equal_keys_apart_from_each_other_are_two_samples(self, tmp_path):
        members = [("a.x", b"1"), ("b.x", b"2"), ("a.x", b"3")]
        assert read(index(shard(tmp_path / "a.tar", members))) == [{"x": b"1"}, {"x": b"2"}, {"x": b"3"}]

    @every_format
    @pytest.mark.parametrize("fields", [None, ("jpg", "__key__")])
    def test_a_tar_whose_samples_are_torn_apart_is_refused(self, tmp_path, kind, fields):
        """As `tar -cf` packs a folder without --sort=name: in the order of the file system."""
        names = [f"photos/{i:03}.{field}" for field in ("jpg", "cls", "txt") for i in range(50)]
        random.Random(0).shuffle(names)
        path = shard(tmp_path / "a.tar", [(name, b"1") for name in names], kind)
        said = rf"^{path}: the sample of 'photos/\d+.\w+' has other members, .* not beside it.*with tar --sort=name -cf"
        for _ in range(2):  # no index of it is kept
            with pytest.raises(ValueError, match=said):
                Tar(fields).index([path])

    @pytest.mark.parametrize(
        "names",
        [
            [f"{i}.{'jpg' if i % 2 else 'png'}" for i in range(40)],  # samples of different kinds
            [f"{i}.x" for i in [*range(20), *range(20)]],  # the same samples twice
            [*(f"{i}.{field}" for i in range(40) for field in ("jpg", "cls")), "0.txt", "1.txt"],  # a few parts
            ["about.json", *(f"{i}.jpg" for i in range(2)), "about.txt"],
            ["0.jpg", "1.png", "0.png", "1.jpg", "0.jpg", "1.png"],  # keys that begin anew, as of joined tars
        ],
    )
    def test_tars_of_unlike_samples_are_read_as_they_are(self, tmp_path, names):
        content = pack([(name, b"1") for name in names])
        (tmp_path / "a.tar").write_bytes(content)
        assert read(index(str(tmp_path / "a.tar"))) == as_webdataset_groups(content)

    def test_members_that_are_no_fields_are_left_out_and_do_not_part_a_sample(self, tmp_path):
        members = [
            ("__info__/a.json", b"no"),
            ("__meta__", b"no"),
            member("d.ir", kind=tarfile.DIRTYPE),
            ("s.x", b"1"),
            ("README", b"no"),
            (".s.y", b"no"),
            ("d/._s.y", b"no"),
            member("s.z", kind=tarfile.SYMTYPE, linkname="s.x"),
            member("s.w", kind=tarfile.LNKTYPE, linkname="s.x"),
            member("s.v", kind=tarfile.FIFOTYPE),
            ("s.y", b"2"),
        ]
        assert read(index(shard(tmp_path / "a.tar", members))) == [{"x": b"1", "y": b"2"}]

    def test_only_the_fields_that_are_wanted_come_in_the_order_in_which_they_are_wanted(self, tmp_path):
        path = shard(tmp_path / "a.tar", [("0.a", b"0a"), ("0.b", b"0b"), ("0.c", b"0c"), ("1.c", b"1c")])
        found = index(path, fields=("c", "a"))
        assert [field.name for field in found.fields] == ["c", "a"]
        assert read(found) == [{"c": b"0c", "a": b"0a"}, {"c": b"1c"}]
        assert found.length_bytes[1].tolist() == [2, -1]

    def test_fields_that_come_after_the_first_samples_are_passed_over(self, tmp_path):
        members = [(f"{i}.{'early' if i < 100 else 'late'}", b"") for i in range(150)]
        assert [field.name for field in index(shard(tmp_path / "a.tar", members)).fields] == ["early"]

    def test_the_first_samples_are_those_of_several_files_if_these_have_few(self, tmp_path):
        paths = [shard(tmp_path / "0.tar", [("0.jpg", b"0"), ("1.jpg", b"1")]), shard(tmp_path / "1.tar", [])]
        paths.append(
            shard(tmp_path / "2.tar", [("2.txt", b"a"), ("2.jpg", b"2"), *((f"{i}.jpg", b"") for i in range(3, 101))])
        )
        paths.append(shard(tmp_path / "3.tar", [("0.late", b"")]))
        found = index(*paths)
        assert [field.name for field in found.fields] == ["jpg", "txt"]
        assert read(found)[:3] == [{"jpg": b"0"}, {"jpg": b"1"}, {"jpg": b"2", "txt": b"a"}]

    def test_files_are_opened_side_by_side_if_the_first_one_is_slow(self, tmp_path, monkeypatch):
        paths = [shard(tmp_path / f"{i}.tar", [member(f"{i}.txt", b"%d" % i)]) for i in range(9)]
        all_open, open_file, opened = threading.Barrier(4, timeout=20), tar.open_file, itertools.count()

        def slow_open(*said, **how):
            if next(opened) == 0:
                time.sleep(0.2)
            else:
                all_open.wait()
            return open_file(*said, **how)

        monkeypatch.setattr(tar, "open_file", slow_open)
        assert read(index(*paths)) == [{"txt": b"%d" % i} for i in range(9)]

    def test_a_field_that_no_sample_has_is_refused(self, tmp_path):
        path = shard(tmp_path / "a.tar", [("0.jpg", b""), ("0.cls", b"")])
        with pytest.raises(
            ValueError,
            match="no sample of .*a.tar .* has the field 'png': they have 'jpg', 'cls', and the key as '__key__'",
        ):
            index(path, fields=("jpg", "png"))

    def test_files_without_samples_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"no samples in .*a.tar \(of 1 files\)"):
            index(shard(tmp_path / "a.tar", [("README", b"")]))

    def test_names_whose_dots_make_fields_of_everything_are_explained(self, tmp_path):
        path = shard(tmp_path / "a.tar", [(f"image.{i:04}.jpg", b"") for i in range(65)])
        with pytest.raises(ValueError, match=r"have 65 fields \('0000.jpg', .*key ends at the first dot"):
            index(path)
        assert len(index(path, fields=("0003.jpg",))) == 1

    @pytest.mark.parametrize("fields", ["jpg", (), ("jpg", "jpg")])
    def test_fields_that_cannot_be_are_refused(self, fields):
        with pytest.raises(ValueError, match="fields names extensions, each once"):
            Tar(fields)

    @every_format
    def test_the_key_is_a_field_that_is_asked_for(self, tmp_path, kind):
        members = [("a/0001.jpg", b"x"), ("a/0001.cls", b"1"), ("é2.jpg", b"y"), ("e" * 150 + ".jpg", b"z")]
        path = shard(tmp_path / "a.tar", members[: 2 if kind == "ustar" else 4], kind)
        assert "__key__" not in index(path).field_names
        data = GDSDataset(
            path, 4, Tar(("__key__", "jpg")), shuffle=False, device="cpu", fields=Fields(decode={"__key__": "txt"})
        )
        keys = [key for batch in data for key in batch["__key__"]]
        assert keys == (["a/0001"] if kind == "ustar" else ["a/0001", "é2", "e" * 150])

    def test_a_key_in_two_parts_of_a_header_is_refused_with_the_way_out(self, tmp_path):
        path = shard(tmp_path / "a.tar", [("d" * 90 + "/" + "n" * 20 + ".x", b"")], "ustar")
        assert len(index(path)) == 1
        with pytest.raises(ValueError, match="two parts of its tar header.*pax or GNU"):
            index(path, fields=("__key__", "x"))

    def test_equal_formats_are_equal_and_a_list_does_for_fields(self):
        assert hash(Tar(["jpg"])) == hash(Tar(("jpg",))) and Tar(["jpg"]) == Tar(("jpg",))

    def test_a_missing_file_and_an_unreadable_one_are_distinguished(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            index(str(tmp_path / "nowhere.tar"))
        with pytest.raises(IoError, match=f"indexing {tmp_path}: reading 4096 bytes at 0 failed: Is a directory"):
            index(str(tmp_path))


NAMES = st.text(st.sampled_from("ab./_é"), min_size=1, max_size=12).filter(
    lambda name: name.strip("/") and ".." not in name.split("/") and not name.endswith("/")
)
KINDS = st.sampled_from([tarfile.REGTYPE] * 6 + [tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.CONTTYPE])


def check_keys(content: bytes) -> None:
    """Check each sample's key by the name that tarfile has of its first member."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        names = {one.offset_data: one.name.encode("utf8", "surrogateescape") for one in archive if one.isreg()}
    try:
        found = read_members(lambda length, at: content[at : at + length], len(content), "a.tar", with_keys=True)
    except ValueError as error:
        assert "two parts of its tar header" in str(error) and any(len(name) > 100 for name in names.values())
        return
    keys, firsts = {}, {}
    for sample, extension, begin, length in zip(*(column.tolist() for column in found[1:]), strict=True):
        if found.extensions[extension] == "__key__":
            keys[sample] = content[begin : begin + length]
        else:
            firsts.setdefault(sample, names[begin])
    for sample, name in firsts.items():
        folder, slash, base = name.rpartition(b"/")
        assert keys[sample] == folder + slash + base.partition(b".")[0]


def test_a_python_that_cannot_ask_the_page_cache_reads_tars(tmp_path, monkeypatch):
    path = shard(tmp_path / "a.tar", [(f"{i}.bin", bytes([i])) for i in range(50)])
    expected = read(index(path))
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert read(index(path)) == expected


class TestFormats:
    @given(
        st.lists(st.tuples(NAMES, st.sampled_from([0, 0, 90, 140]), KINDS, st.integers(0, 1100)), max_size=12),
        st.sampled_from(list(FORMATS)),
        st.booleans(),
    )
    @many
    def test_finds_what_tarfile_and_webdatasets_rules_find(self, tmp_path, drawn, kind, fraction):
        members = []
        for i, (name, deeper, member_kind, size) in enumerate(drawn):
            if kind == "ustar":
                name, deeper = name.replace("é", "e"), min(deeper, 90)
            if member_kind == tarfile.AREGTYPE:
                deeper = 0  # if a long name is cut after a slash, tarfile takes the member for a folder
            data = random_bytes(size, seed=i) if member_kind not in (tarfile.DIRTYPE, tarfile.SYMTYPE) else b""
            time = 0.5 if fraction and kind == "pax" else 0
            members.append(member("d" * deeper + "/" * bool(deeper) + name, data, member_kind, mtime=time))
        content = pack(members, kind)
        try:
            expected = as_webdataset_groups(content)
        except AssertionError:  # a field twice
            with pytest.raises(CorruptData, match="a second time"):
                parse(content)
            return
        found = parse(content)
        got = [{} for _ in range(found.samples)]
        for sample, extension, begin, length in zip(*(column.tolist() for column in found[1:]), strict=True):
            got[sample][found.extensions[extension]] = content[begin : begin + length]
        assert got == expected
        check_keys(content)

    @pytest.mark.parametrize(
        ("kind", "length"),
        [(kind, length) for kind in FORMATS for length in (99, 100, 101, 155, 250)]  # all that ustar has room for
        + [(kind, length) for kind in ("gnu", "pax") for length in (1000, 5000)],
    )
    def test_long_names(self, tmp_path, kind, length):
        stem = "/".join(["d" * 49] * 100)[: length - 6].rstrip("/") + "x"
        members = [(f"{stem}.one", b"1"), (f"{stem}.two", b"2"), (f"{stem[:-1]}y.one", b"3")]
        assert read(index(shard(tmp_path / "a.tar", members, kind))) == [{"one": b"1", "two": b"2"}, {"one": b"3"}]

    @pytest.mark.parametrize("kind", ["gnu", "pax"])
    def test_members_of_more_than_8_gib(self, tmp_path, kind):
        """Eleven octal digits cannot state this size: it is in base 256, or in a pax record."""
        path = tmp_path / "a.tar"
        first = header("0.big", 8 * GIB, kind)
        with open(path, "wb") as file:
            file.write(first)
            file.seek(8 * GIB, os.SEEK_CUR)  # a hole
            file.write(pack([("1.big", b"small")], kind))
        found = index(str(path))
        assert found.begin_bytes[0] == len(first) and found.length_bytes[0] == 8 * GIB
        assert found.length_bytes[1] == 5
        with open(path, "rb") as file:
            file.seek(found.begin_bytes[1, 0])
            assert file.read(5) == b"small"

    def test_a_global_pax_header_holds_for_all_and_a_members_own_wins(self):
        content = extended(b"g", b"14 path=all.x\n") + header("a.x")
        content += extended(b"x", b"14 path=own.y\n") + header("b.x")
        content += extended(b"x", b"8 path=\n") + header("c.z")
        found = parse(content + END)
        assert found.extensions == ("x", "y", "z") and found.samples == 3

    def test_headers_of_before_posix_have_no_prefix(self):
        old = header("a.x")[:257] + bytes(8) + b"what lies here is none".ljust(247, b"!")
        assert parse(with_checksum(old) + END).extensions == ("x",)

    def test_a_checksum_of_signed_bytes_is_accepted(self):
        record = header("a.x")
        record = with_checksum(record[:265] + b"\xff\xfe" + record[267:], signed=True)
        assert parse(record + END).samples == 1

    @pytest.mark.parametrize("field", [b"0000000001\0 ", b"         1 \0", b"1\0\0\0\0\0\0\0\0\0\0\0", b"000000000001"])
    def test_every_way_to_write_a_size(self, field):
        record = header("a.x")
        content = with_checksum(record[:124] + field + record[136:]) + b"!".ljust(512, b"\0") + END
        assert parse(content).length_bytes.tolist() == [1]

    def test_bytes_behind_the_end_are_not_looked_at(self):
        assert parse(pack([("a.x", b"1")]) + b"anything").samples == 1


class TestBadFiles:
    @pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
    @pytest.mark.parametrize("size", [0, 100_000])
    def test_compressed_files_are_refused_with_the_reason(self, tmp_path, compress, size):
        path = tmp_path / "a.tar.gz"
        path.write_bytes(compress(pack([("a.x", random_bytes(size))])))
        with pytest.raises(ValueError, match=r"a.tar.gz is compressed \((gzip|bzip2|xz)\).*decompress it") as caught:
            index(str(path))
        assert not isinstance(caught.value, CorruptData)

    @every_format
    def test_a_file_cut_short_anywhere_before_its_end_is_corrupt(self, kind):
        content = pack([("0.x", random_bytes(700)), ("n" * 120 + ".y" if kind != "ustar" else "0.y", b"2")], kind)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            end = archive.getmembers()[-1].offset_data + 512
        for cut in [*range(0, end, 7), *range(0, end + 1, 512), end + 511]:
            with pytest.raises(CorruptData, match=r"x.tar: its tar header at offset \d+ is damaged: .*; write the"):
                parse(content[:cut])
        assert parse(content[: end + 512]).samples == 1 + (kind != "ustar")

    def test_every_byte_of_a_header_counts(self):
        content = pack([("0.x", b"1"), ("1.x", b"2")], "ustar")
        for at in range(1024, 1536):
            damaged = bytearray(content)
            damaged[at] ^= 0x41
            if tuple(damaged[148 + 1024 : 156 + 1024]) == tuple(content[148 + 1024 : 156 + 1024]):
                with pytest.raises(CorruptData, match="offset 1024 .*checksum differs") as caught:
                    parse(bytes(damaged))
                assert (caught.value.path, caught.value.offset, caught.value.length) == ("x.tar", 1024, 512)

    @pytest.mark.parametrize("name", ["../a.x", "d/../a.x", "..", "d/.."])
    @every_format
    def test_names_that_lead_out_of_their_folder_are_corrupt(self, name, kind):
        with pytest.raises(CorruptData, match=rf"offset \d+ .*the name '{re.escape(name)}' leads out of its folder"):
            parse(pack([(name, b"")], kind))
        assert parse(pack([("a..b/c..x", b"")], kind)).samples == 1

    def test_a_field_twice_in_a_sample_is_corrupt(self, tmp_path):
        path = shard(tmp_path / "a.tar", [("0.x", b""), ("1.x", b""), ("1.y", b""), ("1.X", b"")], "ustar")
        with pytest.raises(CorruptData, match="sample 1 of the file has the field 'x' a second time") as caught:
            index(path, fields=("y",))
        assert (caught.value.path, caught.value.offset) == (path, 3 * 512)

    @pytest.mark.parametrize("size", [513, 8 * GIB, 2**63, 2**64 + 1, 2**87])
    @pytest.mark.parametrize("kind", ["gnu", "pax"])
    def test_a_size_beyond_the_files_end_is_corrupt(self, kind, size):
        content = header("a.x", size, kind) + bytes(512)
        with pytest.raises(CorruptData, match=f"(has {size} bytes, but the file ends at|makes no sense)"):
            parse(content)

    @pytest.mark.parametrize("field", [b"-1", b"0x1", b"1_0", b"1 1", b"8", b"\xff" * 12])
    def test_a_size_that_is_no_number_is_corrupt(self, field):
        record = header("a.x")
        with pytest.raises(CorruptData, match="is no number"):
            parse(with_checksum(record[:124] + field.ljust(12) + record[136:]) + END)

    @pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
    def test_an_absurd_extended_header_is_corrupt_before_it_is_read(self, kind):
        content = header("long", 2**40, type=kind)
        asked = []

        def read_sparse(length: int, offset: int) -> bytes:
            asked.append(length)
            return content[offset : offset + length]

        with pytest.raises(CorruptData, match=f"says that {2**40} bytes of names follow"):
            read_members(read_sparse, 2**42, "x.tar")
        assert max(asked) <= 8192

    @pytest.mark.parametrize(
        "records",
        [
            b"path=a.x\n",
            b"99 path=a.x\n",
            b"9 path:a\n12 path=a.x\n",
            b"13 path=a.x\n",
            b"11 path=a.x\n",
            b"8 path=\n\n",
            b"3 \npath=",
            b"0 path=a.x\n",
            b"12 size=1e3\n",
            b"10 size=-1\n",
            b"13 path=a\0.x\n",
            b"99999999999 path=a.x\n",
        ],
    )
    def test_pax_records_that_lie_are_corrupt(self, records):
        with pytest.raises(CorruptData, match=r"its pax (record|header)|has a zero byte"):
            parse(extended(b"x", records) + header("a.y") + END)

    def test_an_extended_header_of_nothing_is_corrupt(self):
        with pytest.raises(CorruptData, match="ends where the member of an extended header should be"):
            parse(extended(b"L", b"name") + END)

    @pytest.mark.parametrize(
        "content",
        [
            header("a.x", type=b"S") + END,
            header("a.x", type=b"M") + END,
            extended(b"x", b"22 GNU.sparse.major=1\n") + header("a.x") + END,
        ],
    )
    def test_members_that_do_not_lie_as_they_are_are_refused(self, content):
        with pytest.raises(ValueError, match=r"(sparse|volume).*write it plainly") as caught:
            parse(content)
        assert not isinstance(caught.value, CorruptData)

    def test_a_file_that_is_no_tar_says_how_it_starts(self, tmp_path):
        path = tmp_path / "a.tar"
        path.write_bytes(b"\x89PNG\r\n" * 300)
        with pytest.raises(CorruptData, match="offset 0 is damaged: it starts with .*PNG"):
            index(str(path))

    def test_a_file_that_changes_meanwhile_is_corrupt(self, tmp_path, monkeypatch):
        path = shard(tmp_path / "a.tar", [("a.x", b"")])

        def touch(*arguments):
            os.utime(path, ns=(0, 0))
            return read_members(*arguments)

        monkeypatch.setattr(tar, "read_members", touch)
        with pytest.raises(CorruptData, match="changed while it was indexed"):
            index(path)


def survives(content: bytes) -> None:
    """Check that parsing gives extents within ``content`` or a clean refusal, in little memory."""

    def careful(length: int, offset: int) -> bytes:
        assert 0 <= length <= 2**20 and 0 <= offset <= len(content) + 512
        return content[offset : offset + length]

    try:
        found = read_members(careful, len(content), "x.tar")
    except CorruptData as error:
        assert error.path == "x.tar" and 0 <= error.offset <= len(content) + 512
    except ValueError as error:
        assert re.search("sparse|volume|compressed", str(error))
    else:
        assert (found.begin_bytes >= 512).all() and (found.length_bytes >= 0).all()
        assert (found.begin_bytes + found.length_bytes <= len(content)).all()
        assert set(np.diff(found.sample).tolist()) <= {0, 1}
        assert ((found.extension >= 0) & (found.extension < len(found.extensions))).all()


def mutated(content: bytes, dice: random.Random) -> bytes:
    """Change a few bytes, mostly in headers, and mend most checksums for the parser."""
    damaged = bytearray(content)
    records = range(0, len(content) - 512, 512)
    for _ in range(dice.randint(1, 4)):
        at = dice.choice(records)
        match dice.randrange(6):
            case 0:
                damaged[at + dice.randrange(512)] = dice.randrange(256)
            case 1:
                damaged[at + 124 : at + 136] = dice.choice(
                    [b"\x80" + dice.randbytes(11), b"%011o\0" % dice.randrange(5000), dice.randbytes(12)]
                )
            case 2:
                damaged[at + 156] = dice.choice(b"0123567xgLKSMDVA\0")
            case 3:
                damaged[at : at + 512] = content[(other := dice.choice(records)) : other + 512]
            case 4:
                text = dice.choice([b"11 path=a.x\n", b"12 size=700\n", b"18 size=99999999999", b"30 path=../../a"])
                damaged[at : at + len(text)] = text
            case 5:
                del damaged[at : at + dice.choice([1, 512])]
                break
        if dice.random() < 0.9:
            damaged[at : at + 512] = with_checksum(bytes(damaged[at : at + 512]))
    return bytes(damaged[: dice.choice([len(damaged), dice.randrange(len(damaged))])])


def fuzz(rounds: int, seed: int) -> None:
    dice = random.Random(seed)
    seeds = [
        pack([("0.x", random_bytes(600)), ("0.y", b"1"), ("n" * 130 + ".x", b"2"), ("é.x", b"3")], kind)
        if kind != "ustar"
        else pack([("0.x", random_bytes(600)), ("d" * 90 + "/" + "n" * 90 + ".y", b"1")], kind)
        for kind in FORMATS
    ]
    for _ in range(rounds):
        survives(mutated(dice.choice(seeds)[:8192] + END, dice))


class TestFuzz:
    def test_a_long_global_header_costs_no_time_for_each_member(self):
        said = b"".join(b"18 keyword%06d=\n" % i for i in range(50_000)) + b"16 path=0/a.bin\n"
        said = said.ljust(-(-len(said) // 512) * 512, b"\0")
        members = header() * 30_000
        began_s = time.process_time()
        with pytest.raises(CorruptData, match="a second time"):
            parse(extended(b"g", said) + members + END)
        assert time.process_time() - began_s < 3  # it takes 0.3 s; a slow parser took 9 s

    def test_a_name_longer_than_any_is_refused(self):
        with pytest.raises(CorruptData, match="of 20480 bytes is absurd"):
            parse(extended(b"L", b"n" * 20_476 + b".bin") + header() + END)

    @pytest.mark.parametrize("seed", range(4))
    def test_mutated_files_are_refused_cleanly_or_read_within_their_bounds(self, seed):
        fuzz(2000, seed)

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_mutated_files_for_longer(self):
        fuzz(200_000, random.SystemRandom().randrange(2**32))

    @given(st.binary(max_size=2000))
    @many
    def test_any_bytes(self, content):
        survives(content)
        survives(with_checksum(content.ljust(512, b"\0")[:512]) + content + END)

    @given(st.binary(max_size=300))
    @many
    def test_any_bytes_for_an_index(self, content):
        assert unpack_members(content, 1, 2) is None
        assert energon_offsets(content).dtype == dali_offsets(b"v1.2 3\n" + content).dtype == np.int64


class TestIndexCache:
    @pytest.fixture
    def path(self, tmp_path):
        (tmp_path / "data").mkdir()
        return shard(tmp_path / "data" / "a.tar", [("0.x", b"0"), ("1.x", b"1"), ("1.ÿ", b"2")])

    @pytest.fixture
    def passes(self, monkeypatch):
        """Count how often a file's headers were read through."""
        passes = []
        monkeypatch.setattr(tar, "read_members", lambda *arguments: passes.append(1) or read_members(*arguments))
        return passes

    @pytest.mark.parametrize("where", ["user", "beside", "folder"])
    def test_a_second_index_is_read_from_where_the_first_was_kept(self, tmp_path, path, passes, where):
        index_cache = str(tmp_path / "new" / "folder") if where == "folder" else where
        expected = {
            "user": os.path.join(os.environ["XDG_CACHE_HOME"], "gdsdata", "tar"),
            "beside": os.path.dirname(path),
            "folder": index_cache,
        }[where]
        first, second = (Tar(index_cache=index_cache).index([path]) for _ in range(2))
        assert len(passes) == 1
        assert read(first) == read(second) == [{"x": b"0"}, {"x": b"1", "ÿ": b"2"}]
        kept = set(os.listdir(expected)) - {"a.tar"}
        assert len(kept) == 1 and not any(name.endswith(".tmp") for name in kept)
        if where == "beside":
            assert kept == {".a.tar.gdsdata-index"}

    def test_a_kept_index_serves_any_fields(self, path, passes):
        assert [len(Tar(fields).index([path]).fields) for fields in (None, ("x",), ("ÿ",))] == [2, 1, 1]
        assert len(passes) == 1

    @pytest.mark.parametrize("change", ["size", "mtime"])
    def test_a_changed_file_is_indexed_anew(self, path, passes, change):
        Tar().index([path])
        before = os.stat(path)
        if change == "size":
            with open(path, "ab") as file:
                file.write(b"\0")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        else:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        Tar().index([path])
        Tar().index([path])
        assert len(passes) == 2

    def test_files_of_one_name_in_two_folders_are_kept_apart(self, tmp_path, path):
        other = shard(tmp_path / "a.tar", [("9.x", b"9")])
        for _ in range(2):
            assert read(Tar().index([path]))[0] == {"x": b"0"} and read(Tar().index([other])) == [{"x": b"9"}]

    def test_the_kept_index_of_a_tar_of_a_terabyte_takes_few_bytes(self, tmp_path, passes):
        member = tarfile.TarInfo("0.x")
        member.size = 10**12
        path = tmp_path / "large.tar"
        path.write_bytes(member.tobuf(tarfile.GNU_FORMAT))
        os.truncate(path, 512 + -(-member.size // 512) * 512 + 1024)
        for _ in range(2):
            with few_bytes_of_python(MIB):
                assert Tar().index([str(path)]).plan(np.array([0])).lengths.tolist() == [10**12]
        assert len(passes) == 1

    def test_a_damaged_index_is_made_again(self, tmp_path, path, passes):
        Tar(index_cache="beside").index([path])
        kept_at = tmp_path / "data" / ".a.tar.gdsdata-index"
        whole = kept_at.read_bytes()
        damages = [whole[:cut] for cut in range(0, len(whole), 9)]
        # Not the padding, which means nothing.
        for at in [*range(0, 20, 3), *range(24, len(whole), 5)]:
            damages.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        for damaged in [*damages, whole + b"\0", b""]:
            kept_at.write_bytes(damaged)
            passes.clear()
            assert len(Tar(index_cache="beside").index([path])) == 2
            assert len(passes) == 1 and kept_at.read_bytes() == whole

    def test_a_folder_that_takes_no_index_costs_a_warning(self, tmp_path, path):
        (tmp_path / "file").write_bytes(b"")
        for place in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.warns(UserWarning, match="index of tar files cannot be kept in .*: .*will be made again"):
                assert len(Tar(index_cache=str(place)).index([path])) == 2

    @pytest.mark.parametrize("home", [None, "relative"])
    def test_a_user_without_a_home_folder_gets_a_warning_and_no_file(self, tmp_path, path, monkeypatch, home):
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification has it ignored
        monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # the container's /etc/passwd lacks the user
        (tmp_path / "cwd").mkdir()
        monkeypatch.chdir(tmp_path / "cwd")
        with pytest.warns(UserWarning, match="cannot be kept: user [0-9]+ has no home folder: set HOME or"):
            assert len(GDSDataset(path, 1, device="cpu")) == 2
        assert not os.listdir()

    def test_a_failed_write_leaves_nothing_behind(self, path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.warns(UserWarning, match="No space left on device"):
            Tar(index_cache="beside").index([path])
        assert os.listdir(os.path.dirname(path)) == ["a.tar"]

    def test_a_refused_file_is_not_kept(self, path):
        with open(path, "r+b") as file:
            file.write(b"?")
        with pytest.raises(CorruptData):
            Tar(index_cache="beside").index([path])
        assert os.listdir(os.path.dirname(path)) == ["a.tar"]

    def test_extensions_that_are_no_text_are_kept(self):
        members = parse(pack([("a.\udcff\udc80", b"")], "gnu"))
        kept = unpack_members(pack_members(members, 2048, 6), 2048, 6)
        assert kept.extensions == members.extensions == ("\udcff\udc80",)
        assert unpack_members(pack_members(members, 2048, 6), 2048, 7) is None

    @pytest.mark.parametrize(
        "lie",
        [
            {"extensions": ("x", 3)},
            {"extensions": ("x",)},
            {"sample": [1, 1]},
            {"sample": [0, 2]},
            {"sample": [0, -1]},
            {"sample": [-1, 0]},
            {"extension": [0, 2]},
            {"extension": [-1, 0]},
            {"begin_bytes": [512, 2000]},
            {"begin_bytes": [0, 1536]},
            {"begin_bytes": [512, 2**63 - 1]},
            {"length_bytes": [3, -1]},
            {"length_bytes": [3, 2**63 - 1]},
        ],
    )
    def test_an_index_that_lies_with_a_sound_checksum_is_made_again(self, lie):
        def members(**parts):
            extensions = parts.pop("extensions", ("x", "y"))
            sound = {"sample": [0, 1], "extension": [0, 1], "begin_bytes": [512, 1536], "length_bytes": [3, 512]}
            return Members(extensions, *(np.array(column, np.int64) for column in {**sound, **parts}.values()))

        assert unpack_members(pack_members(members(), 2048, 6), 2048, 6) is not None
        assert unpack_members(pack_members(members(**lie), 2048, 6), 2048, 6) is None


def not_in_memory(*arguments):
    raise BlockingIOError


class TestReading:
    """The page cache holds what was read."""

    MEMBERS = 100
    BYTES = 150_000

    @pytest.fixture
    def path(self, tmp_path):
        data = random_bytes(self.BYTES)
        path = shard(tmp_path / "a.b.tar", [(f"{i:04}.bin", data) for i in range(self.MEMBERS)])
        if not drop_cache(tmp_path / "a.b.tar"):
            pytest.skip("this file system cannot drop its cache")
        return path

    @pytest.mark.parametrize("project", ["energon", "dali"])
    def test_another_projects_index_says_where_to_read_ahead(self, tmp_path, path, monkeypatch, project):
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            headers = [info.offset for info in members] + [archive.offset]
        if project == "energon":
            np.array(headers, "<u8").tofile(f"{path}.idx")
        else:
            lines = [f"bin {info.offset_data} {info.size} {info.name}" for info in members]
            (tmp_path / "a.idx").write_text("\n".join([f"v1.2 {len(members)}", *lines, ""]))
        file = tmp_path / "a.b.tar"
        warm_cache(file)
        expected = index(path)
        assert drop_cache(file)
        asked = []
        advise = os.posix_fadvise
        monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: asked.append(arguments[1:]) or advise(*arguments))
        monkeypatch.setattr(os, "preadv", not_in_memory)  # data that others have cached meanwhile counts as uncached
        assert (index(path).begin_bytes == expected.begin_bytes).all()
        ahead = [(begin, length) for begin, length, advice in asked if advice == os.POSIX_FADV_WILLNEED]
        assert len(ahead) >= self.MEMBERS
        assert all(any(begin <= at < begin + length for begin, length in ahead) for at in headers[:-1])
        pages = resident_pages(file)
        assert 0 < pages <= self.MEMBERS * 4 + 8 < file.stat().st_size / 4096 / 5

    def test_an_index_of_another_file_changes_nothing(self, tmp_path, path):
        expected = index(path)
        for foreign in (random_bytes(8001), b"v1.2 7\nbin nan 3\n", b"", np.arange(999, dtype="<u8").tobytes()):
            for name in ("a.b.tar.idx", "a.idx"):
                (tmp_path / name).write_bytes(foreign)
            assert drop_cache(tmp_path / "a.b.tar")
            assert (index(path).begin_bytes == expected.begin_bytes).all()

    def test_headers_alone_are_asked_for(self, path):
        with open(path, "rb") as file:
            content, asked = file.read(), []
        read_members(lambda n, at: asked.append(n) or content[at : at + n], len(content), "x.tar")
        most = self.MEMBERS + 4  # the bytes after the end of the members are read, too
        assert len(asked) <= most and sum(asked) <= 4096 * most

    def test_a_file_system_without_nowait_is_read_all_the_same(self, path, monkeypatch):
        expected = index(path)

        def refuse(*_):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "preadv", refuse)
        assert (index(path).begin_bytes == expected.begin_bytes).all()


class TestForeignIndexes:
    def test_energons_offsets(self):
        assert energon_offsets(struct.pack("<3Q", 0, 1536, 2**40) + b"rest").tolist() == [0, 1536, 2**40]

    def test_dalis_offsets(self):
        assert dali_offsets(b"v1.2 2\njpg 512 9 a cls 1536 1 a\njpg 2560 7 b\n").tolist() == [512, 1536, 2560]
        assert dali_offsets(b"v1.1 1\njpg 512 9 cls 1536 1\n").tolist() == [512, 1536]
        assert dali_offsets(b"v9.9 1\njpg 512 9 a.jpg\n").tolist() == []


class TestWhatFollowsTheEnd:
    """Two blocks of zeros end a tar. Other readers ignore anything behind one block."""

    def test_members_behind_a_lone_block_of_zeros_are_refused_with_its_place(self, tmp_path):
        path = tmp_path / "a.tar"
        shard(path, [("0.x", b"0" * 600), ("1.x", b"1"), ("2.x", b"2")], "ustar")
        whole = path.read_bytes()
        second = 512 + 1024
        path.write_bytes(whole[:second] + bytes(512) + whole[second:])
        with pytest.raises(CorruptData, match=rf"at offset {second} .*a lone block of zeros .*write") as caught:
            index(str(path))
        assert (caught.value.path, caught.value.offset) == (str(path), second)

    def test_a_lone_block_of_zeros_at_the_very_end_is_the_end(self, tmp_path):
        path = tmp_path / "a.tar"
        shard(path, [("0.x", b"0")], "ustar")
        path.write_bytes(path.read_bytes()[:1024] + bytes(512))
        assert read(index(str(path))) == [{"x": b"0"}]

    @pytest.mark.parametrize("blocks", [2, 20, 255])
    def test_tars_laid_end_to_end_are_refused_with_both_places(self, tmp_path, blocks):
        path = tmp_path / "a.tar"
        shard(path, [("0.x", b"0")], "ustar")
        one = path.read_bytes()[:1024] + bytes(512 * blocks)
        path.write_bytes(one + one)
        with pytest.raises(CorruptData, match=rf"another one begins at {len(one)}, .*tar --concatenate") as caught:
            index(str(path))
        assert caught.value.offset == 1024

    @pytest.mark.parametrize("tail", [bytes(9 * 1024), bytes(2**20), bytes(1024) + b"a signature, say" * 40])
    def test_zeros_and_what_is_no_tar_may_follow_the_end(self, tmp_path, tail):
        path = tmp_path / "a.tar"
        shard(path, [("0.x", b"0")], "ustar")
        path.write_bytes(path.read_bytes()[:1024] + bytes(1024) + tail)
        assert read(index(str(path))) == [{"x": b"0"}]

    def test_such_a_file_is_left_out_where_damage_is_skipped(self, tmp_path):
        sound, damaged = tmp_path / "a.tar", tmp_path / "b.tar"
        shard(sound, [("0.x", b"0")], "ustar")
        shard(damaged, [("1.x", b"1"), ("2.x", b"2")], "ustar")
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:1024] + bytes(512) + whole[1024:])
        data = GDSDataset([str(sound), str(damaged)], 1, on_error="skip", shuffle=False, device="cpu")
        assert len(list(data)) == 1
        ((path, offset, reason),) = data.stats()["skipped"]["named"]
        assert (path, offset) == (str(damaged), 1024) and "a lone block of zeros" in reason


class TestFieldsThatLaterSamplesHave:
    """With fields=None those of the first 100 samples are read; others must not go unseen."""

    def shards(self, tmp_path, *names: str) -> list[str]:
        first = [member(f"a/{i:03}.{name}", b"1") for i in range(100) for name in ("cls", "jpg")]
        return [shard(tmp_path / "0.tar", first), shard(tmp_path / "1.tar", [member(f"b/{n}", b"2") for n in names])]

    @pytest.mark.parametrize("names", [("0.jpg", "0.txt"), ("0.000.jpg", "0.001.jpg")], ids=["optional", "frames"])
    def test_are_named_in_a_warning(self, tmp_path, names):
        new = next(name for name in names if name != "0.jpg").partition(".")[2]
        with pytest.warns(RuntimeWarning, match=rf"1.tar: .*fields \({new!r}.*first 100 .*Tar\(fields=") as caught:
            found = index(*self.shards(tmp_path, *names))
        assert [field.name for field in found.fields] == ["cls", "jpg"] and len(found) == 101
        assert len(caught) == 1

    def test_are_no_warning_if_the_caller_chose_fields(self, tmp_path, recwarn):
        index(*self.shards(tmp_path, "0.jpg", "0.txt"), fields=("jpg",))
        index(*self.shards(tmp_path, "0.jpg", "0.cls"))
        assert not list(recwarn)
