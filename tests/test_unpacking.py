"""Lengths that compressed shards say of themselves never become memory."""

import pytest
from shard_files import edit_json, set_at
from tables import pa
from test_mds import pack_shards, write_plain

from gdsdata.errors import CorruptData
from gdsdata.formats import Mds

pytestmark = pytest.mark.filterwarnings("ignore:gdsdata")


def varint(number: int) -> bytes:
    """Return snappy's form of a length: seven bits a byte, the lowest first."""
    some = []
    while number >= 128:
        some.append(number & 127 | 128)
        number >>= 7
    return bytes([*some, number])


@pytest.fixture
def snappy(tmp_path, monkeypatch):
    """Return a function that indexes a shard of some bytes, and says what was allocated for it."""
    allocated: list[int] = []
    decompress = pa.decompress

    def noted(content, size_bytes, **how):
        allocated.append(size_bytes)
        return decompress(content, size_bytes, **how)

    monkeypatch.setattr(pa, "decompress", noted)

    def index(content: bytes, size_bytes: int) -> list[int]:
        folder = tmp_path / "data"
        folder.mkdir()
        write_plain(folder)
        pack_shards(folder, "snappy")
        (folder / "shard.00000.mds.snappy").write_bytes(content)
        edit_json(folder / "index.json", set_at(["shards", 0, "zip_data", "bytes"], len(content)))
        edit_json(folder / "index.json", set_at(["shards", 0, "raw_data", "bytes"], size_bytes))
        edit_json(folder / "index.json", set_at(["shards", 1], ...))
        with pytest.raises(CorruptData, match="its snappy is damaged") as caught:
            Mds(unpacked=str(tmp_path / "kept")).index([str(folder / "index.json")])
        assert caught.value.path.endswith("shard.00000.mds.snappy")
        return allocated

    return index


@pytest.mark.parametrize("said", [2**20 - 1, 2**20 + 1, 2**32 - 1])
def test_a_length_of_snappy_that_index_json_does_not_say_is_not_allocated(snappy, said):
    packed = pa.compress(bytes(2**20), "snappy", asbytes=True)
    assert snappy(packed, said) == []


def test_a_length_of_snappy_that_its_bytes_cannot_have_is_not_allocated(snappy):
    assert snappy(varint(2**32 - 1) + bytes(1000), 2**32 - 1) == []


def test_a_length_of_snappy_that_never_ends_is_not_allocated(snappy):
    assert snappy(b"\xff" * 1000, 100) == []
