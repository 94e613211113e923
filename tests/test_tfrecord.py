"""TFRecord files and their checksums: every record is found, and false values are refused."""

import gzip
import os
import random
import struct
import zlib

import numpy as np
import pytest
from helpers import grouped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdsdata import Fields, GDSDataset, Lanes
from gdsdata.decoders import Undecodable
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.fields import Field
from gdsdata.formats.parsers import tfrecord_records
from gdsdata.formats.parsers.tfrecord_records import find_records
from gdsdata.formats.tfrecord import TFRecord
from gdsdata.io.engine import crc32c_of_rows

# Hypothesis runs one test function many times with one tmp_path. Every example here overwrites its
# files.
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def crc32c_by_bits(data: bytes) -> int:
    register = 0xFFFFFFFF
    for octet in data:
        register ^= octet
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def crc32c(strings) -> np.ndarray:
    """Return the engine's checksum of each string: uint32 (m,)."""
    rows = [crc32c_of_rows(np.frombuffer(string, np.uint8)[None]) for string in strings]
    return np.concatenate([np.empty(0, np.uint32), *rows])


def masked(data: bytes) -> bytes:
    checksum = crc32c_by_bits(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def read_of(data: bytes):
    return lambda offset, count: data[offset : offset + count]


def records_in(index) -> list[bytes]:
    """Read the records by their extents alone, as an engine would."""
    _, files, offsets, lengths, _ = index.plan(np.arange(len(index)))
    found = []
    for file, offset, length in zip(files, offsets, lengths, strict=True):
        with open(index.paths[file], "rb") as stream:
            stream.seek(offset)
            found.append(stream.read(length))
    return found


class TestChecksums:
    @pytest.mark.parametrize(
        "data, expected",
        [
            (b"", 0),
            (b"123456789", 0xE3069283),
            (bytes(32), 0x8A9136AA),
            (b"\xff" * 32, 0x62A8AB43),
            (bytes(range(32)), 0x46DD794E),
            (bytes(range(31, -1, -1)), 0x113FDB5C),
        ],
    )
    def test_are_those_of_the_standard(self, data, expected):
        """Source: RFC 3720, appendix B.4, and the usual check value."""
        assert crc32c([data]).tolist() == [expected]

    @given(st.integers(0, 8), st.integers(0, 70), st.randoms(use_true_random=False))
    @many
    def test_of_many_rows_are_each_ones_own(self, count, length, rng):
        rows = np.frombuffer(rng.randbytes(count * length), np.uint8).reshape(count, length)
        found = crc32c_of_rows(rows)
        assert found.dtype == np.uint32 and found.tolist() == [crc32c_by_bits(row.tobytes()) for row in rows]

    def test_of_rows_that_are_columns_of_a_wider_array(self):
        rows = np.arange(40, dtype=np.uint8).reshape(4, 10)
        assert crc32c_of_rows(rows[:, 2:5]).tolist() == [crc32c_by_bits(row[2:5].tobytes()) for row in rows]

    @pytest.mark.parametrize("rows", [np.zeros(4, np.uint8), np.zeros((1, 2, 3), np.uint8)])
    def test_of_anything_but_rows_are_refused(self, rows):
        with pytest.raises(ValueError, match="two dimensions"):
            crc32c_of_rows(rows)

    @pytest.mark.parametrize("length", [255, 256, 257, 4095, 4096, 4097])
    def test_of_lengths_about_a_power_of_two(self, length):
        data = random.Random(length).randbytes(length)
        assert crc32c([data, memoryview(data)[1:]]).tolist() == [crc32c_by_bits(data), crc32c_by_bits(data[1:])]


class TestRecords:
    @given(st.lists(st.lists(st.binary(max_size=40), max_size=12), min_size=1, max_size=3), st.booleans())
    @many
    def test_are_all_found(self, tmp_path, files, checked):
        paths = []
        for i, records in enumerate(files):
            paths.append(str(tmp_path / f"{i}.tfrecord"))
            (tmp_path / f"{i}.tfrecord").write_bytes(b"".join(map(record, records)))
        index = TFRecord(check_data=checked).index(paths)
        assert records_in(index) == [data for records in files for data in records]
        assert index.fields == (Field("data"),)
        assert index.first_sample.tolist() == np.cumsum([0, *map(len, files)]).tolist()
        assert index.begin_bytes.dtype == index.length_bytes.dtype == np.int64
        expected = [crc32c_by_bits(data) for records in files for data in records]
        assert index.checksums[:, 0].tolist() == expected if checked else index.checksums is None

    @pytest.mark.parametrize("window_bytes", [12, 13, 64, 1000])
    @pytest.mark.parametrize("long_bytes", [0, 20, 10**6])
    @pytest.mark.parametrize("heads_at_once", [1, 7, 10**6])
    def test_are_found_wherever_windows_end(self, monkeypatch, window_bytes, long_bytes, heads_at_once):
        monkeypatch.setattr(tfrecord_records, "_WINDOW_BYTES", window_bytes)
        monkeypatch.setattr(tfrecord_records, "_LONG_BYTES", long_bytes)
        monkeypatch.setattr(tfrecord_records, "_HEADS_AT_ONCE", heads_at_once)
        rng = random.Random(0)
        records = [rng.randbytes(rng.choice([0, 1, 5, 19, 20, 21, 60])) for _ in range(60)]
        data = b"".join(map(record, records))
        begins, lengths, checksums = find_records(read_of(data), len(data), "here")
        assert [data[at : at + n] for at, n in zip(begins, lengths, strict=True)] == records
        assert checksums.dtype == np.uint32 and checksums.tolist() == list(map(crc32c_by_bits, records))

    def test_longer_than_the_window_are_not_read(self):
        long = bytes(2**20)
        data = b"".join(map(record_unchecked, [long] * 20))
        read_bytes = 0

        def read(offset, count):
            nonlocal read_bytes
            read_bytes += len(part := data[offset : offset + count])
            return part

        begins, _, _ = find_records(read, len(data), "here")
        assert len(begins) == 20 and read_bytes == 20 * (12 + 4)

    def test_head_is_that_of_tensorflows_own_files(self):
        """TensorBoard's files begin with a record of 24 bytes, hence with these twelve."""
        head = bytes.fromhex("1800000000000000a37f4b22")
        begins, lengths, _ = find_records(read_of(head + bytes(28)), 40, "here")
        assert (begins.tolist(), lengths.tolist()) == ([12], [24])

    def test_size_and_time_of_each_file_are_kept(self, tmp_path):
        (tmp_path / "a").write_bytes(record(b"abc"))
        index = TFRecord().index([str(tmp_path / "a")])
        assert (index.size_bytes[0], index.mtime_ns[0]) == (19, os.stat(tmp_path / "a").st_mtime_ns)

    def test_a_missing_file_and_an_unreadable_one_are_distinguished(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            TFRecord().index([str(tmp_path / "nowhere")])
        with pytest.raises(IoError, match="Is a directory"):
            TFRecord().index([str(tmp_path)])


def record_unchecked(data: bytes) -> bytes:
    """Make a `record` without the data's checksum, which takes long in pure Python."""
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + bytes(4)


def forged(length: int) -> bytes:
    """Make a head whose checksum is right, but whose length is false."""
    return (packed := struct.pack("<Q", length)) + masked(packed)


class TestDamage:
    SOUND = record(b"abc") + record(b"defgh")  # heads at 0 and 19

    @pytest.mark.parametrize(
        "data, offset, length, reason",
        [
            (b"\0", 0, 1, "the file ends at 1, within the record that begins here"),
            (SOUND[:18], 0, 18, "the file ends at 18"),
            (SOUND[:19] + b"\5", 19, 1, "the file ends at 20"),
            (SOUND[:-1], 19, 20, "the file ends at 39"),
            (SOUND + bytes(11), 40, 11, "the file ends at 51"),
            (bytes(64), 0, 12, "does not have the checksum beside it"),
            (SOUND[:19] + b"\4" + SOUND[20:], 19, 12, "does not have the checksum beside it"),
            (SOUND[:27] + b"\0" + SOUND[28:], 19, 12, "does not have the checksum beside it"),
            (SOUND[:19] + forged(2**64 - 1), 19, 12, "the file ends at 31"),
            (SOUND[:19] + forged(2**63 - 30) + bytes(100), 19, 112, "the file ends at 131"),
            (SOUND[:19] + forged(2**50), 19, 12, "the file ends at 31"),
        ],
    )
    def test_is_found_where_it_is(self, data, offset, length, reason):
        with pytest.raises(CorruptData, match=reason) as caught:
            find_records(read_of(data), len(data), "here")
        assert (caught.value.path, caught.value.offset, caught.value.length) == ("here", offset, length)
        assert str(caught.value).startswith(f"here is damaged at bytes {offset} to {offset + length}: ")

    def test_of_any_of_many_files_is_reported(self, tmp_path):
        paths = [str(tmp_path / f"{i:02}") for i in range(40)]
        for path in paths:
            with open(path, "wb") as file:
                file.write(self.SOUND)
        os.truncate(paths[23], 39)
        with pytest.raises(CorruptData, match="23 is damaged at bytes 19 to 39"):
            TFRecord().index(paths)

    @pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
    def test_a_compressed_file_is_called_so(self, compress):
        data = compress(self.SOUND)
        with pytest.raises(ValueError, match="here is compressed as a whole") as caught:
            find_records(read_of(data), len(data), "here")
        assert not isinstance(caught.value, CorruptData)

    def test_a_file_that_becomes_shorter_is_noticed(self):
        with pytest.raises(CorruptData, match="within the record that begins here"):
            find_records(read_of(self.SOUND[:25]), len(self.SOUND), "here")
        with pytest.raises(CorruptData, match="has become shorter while it was indexed"):
            find_records(read_of(self.SOUND[:-1]), len(self.SOUND), "here")

    def test_no_mutation_gives_other_records_than_were_written(self):
        """A mutation is refused, or the records found are the first of those written."""
        rng, outcomes = random.Random(1), {"read": 0, "refused": 0}
        records = [rng.randbytes(n) for n in (3, 0, 9, 30)]
        sound = b"".join(map(record, records))
        for _ in range(5000):
            data = bytearray(sound)
            if rng.random() < 0.2:
                del data[rng.randrange(len(data) + 1) :]
            elif rng.random() < 0.2:
                at = rng.randrange(len(data))
                data[at:at] = rng.randbytes(rng.randint(1, 20))
            else:
                for _ in range(rng.randint(1, 4)):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            read = read_of(bytes(data))
            try:
                begins, lengths, checksums = find_records(read, len(data), "here")
            except CorruptData as error:
                assert 0 <= error.offset <= error.offset + error.length <= len(data)
                outcomes["refused"] += 1
                continue
            found = [bytes(data[at : at + n]) for at, n in zip(begins, lengths, strict=True)]
            if (crc32c(found) == checksums).all():
                assert found == records[: len(found)]
                outcomes["read"] += 1
            else:
                outcomes["refused"] += 1
        assert min(outcomes.values()) > 20, outcomes


class TestDataThatAreRead:
    """The checksum of each record's data is compared when the engine has read it."""

    RECORDS = [random.Random(i).randbytes(size) for i, size in enumerate((40, 0, 3000, 1, 70_000, 12))]

    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "x.tfrecord"
        path.write_bytes(b"".join(map(record, self.RECORDS)))
        return path

    @staticmethod
    def damage(path, which: int, at: int = 0) -> int:
        """Change a bit of a record's data, or (-1) of its checksum. Returns the data's offset."""
        before = TestDataThatAreRead.RECORDS[:which]
        begin = sum(map(len, before)) + 16 * len(before) + 12
        data = bytearray(path.read_bytes())
        data[begin + (at if at >= 0 else len(TestDataThatAreRead.RECORDS[which]))] ^= 4
        path.write_bytes(data)
        return begin

    @staticmethod
    def read(path, format=None, **options) -> list[bytes]:
        data = GDSDataset(path, 4, format or TFRecord(), shuffle=False, device="cpu", **grouped(options))
        return [bytes(one.numpy()) for batch in data for one in batch["data"].as_list()]

    def test_sound_data_come_as_they_are(self, path):
        assert self.read(path) == self.read(path, TFRecord(check_data=False)) == self.RECORDS

    @pytest.mark.parametrize("which, at", [(0, 0), (2, 2999), (3, 0), (4, 50_000), (5, 11), (0, -1), (1, -1), (4, -1)])
    def test_damage_is_named_with_its_path_offset_and_remedy(self, path, which, at):
        begin = self.damage(path, which, at)
        length = len(self.RECORDS[which])
        said = rf"{path}: field 'data' of {length} bytes at offset {begin} has the crc32c .* write or copy it again"
        with pytest.raises(CorruptData, match=said) as caught:
            self.read(path)
        assert (caught.value.path, caught.value.offset, caught.value.length) == (str(path), begin, length)

    def test_damage_is_read_where_it_is_not_asked_for(self, path):
        self.damage(path, 0)
        found = self.read(path, TFRecord(check_data=False))
        assert found[0] != self.RECORDS[0] and found[1:] == self.RECORDS[1:]

    @pytest.mark.filterwarnings("ignore:gdsdata. a sample is left out")
    def test_bad_records_alone_are_left_out(self, path):
        places = [self.damage(path, which) for which in (2, 5)]
        data = GDSDataset(path, 6, TFRecord(), shuffle=False, device="cpu", on_error="skip")
        (batch,) = data
        assert [bytes(one.numpy()) for one in batch["data"].as_list()] == [self.RECORDS[i] for i in (0, 1, 3, 4)]
        assert [(path, offset) for path, offset, _ in data.stats()["skipped"]["named"]] == [
            (str(path), place) for place in places
        ]

    def test_damage_is_named_where_it_is_when_pieces_are_read_ahead(self, tmp_path):
        """The pieces are copies of the files in memory."""
        path = tmp_path / "x.tfrecord"
        records = [random.Random(i).randbytes(500) for i in range(64)]
        content = bytearray(b"".join(map(record, records)))
        begin = 40 * 516 + 12
        content[begin] ^= 1
        path.write_bytes(content)
        data = GDSDataset(path, 8, TFRecord(), shuffle=Lanes(2, 5, 4), device="cpu")
        with pytest.raises(CorruptData, match="field 'data' of 500 bytes") as caught:
            list(data)
        assert (caught.value.path, caught.value.offset, caught.value.length) == (str(path), begin, 500)

    def test_a_decoder_never_sees_bad_data(self, path):
        self.damage(path, 4, 69_000)
        seen = []
        with pytest.raises(CorruptData, match="crc32c"):
            list(GDSDataset(path, 6, shuffle=False, device="cpu", fields=Fields(decode={"data": seen.append})))
        assert not seen

    def test_a_sample_that_a_decoder_refuses_is_named_if_pieces_are_read_ahead(self, tmp_path):
        path = tmp_path / "x.tfrecord"
        path.write_bytes(b"".join(record(bytes([i]) * 500) for i in range(64)))

        def refuse(samples):
            for i, sample in enumerate(samples):
                if sample[0] == 40:
                    raise Undecodable(i, "it is the fortieth")

        data = GDSDataset(
            path, 8, TFRecord(), shuffle=Lanes(2, 5, 4), device="cpu", fields=Fields(decode={"data": refuse})
        )
        with pytest.raises(
            CorruptData, match='cannot be decoded: it is the fortieth. Write .* or pass on_error="skip"'
        ) as caught:
            list(data)
        assert (caught.value.path, caught.value.offset, caught.value.length) == (str(path), 40 * 516 + 12, 500)


@pytest.mark.parametrize("ending", ["idx", "index"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_indexes_that_other_readers_keep_beside_records_are_passed_over(tmp_path, ending, on_error, recwarn):
    for name in ("a", "b"):
        (tmp_path / f"{name}.tfrecord").write_bytes(record(b"one") + record(b"two"))
        (tmp_path / f"{name}.{ending}").write_text("0 19\n19 19\n")  # as DALI's tfrecord2idx writes it
    formats = [TFRecord()] if ending == "index" else [TFRecord(), None]
    for format in formats:
        assert len(GDSDataset(tmp_path, 1, format, device="cpu", on_error=on_error)) == 4
    assert not [one for one in recwarn if "left out" in str(one.message)]


def test_an_index_alone_is_still_refused(tmp_path):
    (tmp_path / "a.idx").write_text("0 19\n19 19\n")
    with pytest.raises(CorruptData, match="a.idx is damaged"):
        GDSDataset(tmp_path, 1, TFRecord(), device="cpu")
