"""TFRecord files and their checksums: every record is found, and nothing believed that a file says wrongly."""

import gzip
import os
import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import tfrecord
from gdsdata.formats.crc32c import crc32c, crc32c_joined
from gdsdata.formats.fields import Field
from gdsdata.formats.tfrecord import TFRecord, check_data, find_records

# Hypothesis runs one test function many times with one tmp_path; every example here overwrites what it reads.
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def crc32c_by_bits(data: bytes) -> int:
    register = 0xFFFFFFFF
    for octet in data:
        register ^= octet
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    checksum = crc32c_by_bits(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def read_of(data: bytes):
    return lambda offset, count: data[offset : offset + count]


def records_in(index) -> list[bytes]:
    """The records as an engine would read them: by their extents, and nothing else."""
    files, offsets, lengths = index.extents(np.arange(len(index)))
    found = []
    for file, offset, length in zip(files, offsets[:, 0], lengths[:, 0], strict=True):
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
        """RFC 3720, appendix B.4, and the usual check value."""
        assert crc32c([data]).tolist() == [expected]

    @given(st.lists(st.binary(max_size=70), max_size=8))
    @many
    def test_of_many_strings_are_each_ones_own(self, strings):
        found = crc32c(strings)
        assert found.dtype == np.uint32 and found.tolist() == [crc32c_by_bits(string) for string in strings]

    @pytest.mark.parametrize("length", [255, 256, 257, 4095, 4096, 4097])
    def test_of_lengths_about_a_power_of_two(self, length):
        data = random.Random(length).randbytes(length)
        assert crc32c([data, memoryview(data)[1:]]).tolist() == [crc32c_by_bits(data), crc32c_by_bits(data[1:])]

    @given(st.binary(max_size=40), st.binary(max_size=40))
    @many
    def test_of_two_strings_are_joined_without_their_bytes(self, first, second):
        joined = crc32c_joined(crc32c([first]), crc32c([second]), np.array([len(second)]))
        assert joined.tolist() == [crc32c_by_bits(first + second)]


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

    @pytest.mark.parametrize("window_bytes", [12, 13, 64, 1000])
    @pytest.mark.parametrize("long_bytes", [0, 20, 10**6])
    @pytest.mark.parametrize("heads_at_once", [1, 7, 10**6])
    def test_are_found_wherever_windows_end(self, monkeypatch, window_bytes, long_bytes, heads_at_once):
        monkeypatch.setattr(tfrecord, "_WINDOW_BYTES", window_bytes)
        monkeypatch.setattr(tfrecord, "_LONG_BYTES", long_bytes)
        monkeypatch.setattr(tfrecord, "_HEADS_AT_ONCE", heads_at_once)
        rng = random.Random(0)
        records = [rng.randbytes(rng.choice([0, 1, 5, 19, 20, 21, 60])) for _ in range(60)]
        data = b"".join(map(record, records))
        begins, lengths = find_records(read_of(data), len(data), "here")
        assert [data[at : at + n] for at, n in zip(begins, lengths, strict=True)] == records

    @pytest.mark.parametrize("at_once_bytes", [1, 50, 200, 10**6])
    def test_data_are_checked_in_whatever_groups(self, monkeypatch, at_once_bytes):
        monkeypatch.setattr(tfrecord, "_DATA_AT_ONCE_BYTES", at_once_bytes)
        records = [random.Random(i).randbytes(i * 7 % 90) for i in range(1, 40)]
        sound = b"".join(map(record, records))
        begins, lengths = find_records(read_of(sound), len(sound), "here")
        check_data(read_of(sound), begins, lengths, "here")
        for bad in (0, 17, 38):
            for at in (begins[bad], begins[bad] + lengths[bad] - 1, begins[bad] + lengths[bad] + 3):
                data = bytearray(sound)
                data[at] ^= 1
                with pytest.raises(CorruptData, match=f"the data of record {bad} do not have") as caught:
                    check_data(read_of(bytes(data)), begins, lengths, "here")
                assert (caught.value.offset, caught.value.length) == (begins[bad], lengths[bad])

    def test_longer_than_the_window_are_not_read(self):
        long = bytes(2**20)
        data = b"".join(map(record_unchecked, [long] * 20))
        read_bytes = 0

        def read(offset, count):
            nonlocal read_bytes
            read_bytes += len(part := data[offset : offset + count])
            return part

        begins, _ = find_records(read, len(data), "here")
        assert len(begins) == 20 and read_bytes == 20 * 12

    def test_head_is_that_of_tensorflows_own_files(self):
        """TensorBoard's files begin with a record of 24 bytes, hence with these twelve."""
        head = bytes.fromhex("1800000000000000a37f4b22")
        begins, lengths = find_records(read_of(head + bytes(28)), 40, "here")
        assert (begins.tolist(), lengths.tolist()) == ([12], [24])

    def test_size_and_time_of_each_file_are_kept(self, tmp_path):
        (tmp_path / "a").write_bytes(record(b"abc"))
        index = TFRecord().index([str(tmp_path / "a")])
        assert (index.size_bytes[0], index.mtime_ns[0]) == (19, os.stat(tmp_path / "a").st_mtime_ns)

    def test_a_missing_file_and_an_unreadable_one_are_told_apart(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            TFRecord().index([str(tmp_path / "nowhere")])
        with pytest.raises(IoError, match="Is a directory"):
            TFRecord().index([str(tmp_path)])


def record_unchecked(data: bytes) -> bytes:
    """As `record`, with no checksum of the data, which takes long in pure Python."""
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + bytes(4)


def forged(length: int) -> bytes:
    """A head whose checksum is right for a length that lies."""
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

    def test_of_data_is_found_when_asked_for(self, tmp_path):
        path = tmp_path / "a"
        path.write_bytes(self.SOUND[:33] + b"?" + self.SOUND[34:])
        assert len(TFRecord().index([str(path)])) == 2
        with pytest.raises(CorruptData, match="the data of record 1 do not have the checksum behind them") as caught:
            TFRecord(check_data=True).index([str(path)])
        assert (caught.value.path, caught.value.offset, caught.value.length) == (str(path), 31, 5)

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
        begins, lengths = find_records(read_of(self.SOUND), len(self.SOUND), "here")
        with pytest.raises(CorruptData, match="within the record that begins here"):
            find_records(read_of(self.SOUND[:25]), len(self.SOUND), "here")
        with pytest.raises(CorruptData, match="has become shorter while it was indexed"):
            check_data(read_of(self.SOUND[:-1]), begins, lengths, "here")

    def test_no_mutation_gives_other_records_than_were_written(self):
        """Whatever is changed, it is refused, or what is found are the first of the records that were written."""
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
                begins, lengths = find_records(read, len(data), "here")
                check_data(read, begins, lengths, "here")
            except CorruptData as error:
                assert 0 <= error.offset <= error.offset + error.length <= len(data)
                outcomes["refused"] += 1
            else:
                found = [bytes(data[at : at + n]) for at, n in zip(begins, lengths, strict=True)]
                assert found == records[: len(found)]
                outcomes["read"] += 1
        assert min(outcomes.values()) > 20, outcomes
