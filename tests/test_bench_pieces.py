"""The parts with which case=latency and case=tensor make, change and compare their bytes."""

import os

import pytest
import torch

from gdsdata.bench.data import pieces

pytestmark = pytest.mark.usefixtures("quick_programs")

PIECE = pieces.PIECE_BYTES
SIZES = [1, 7, 4097, PIECE, 3 * PIECE + 5]


@pytest.mark.parametrize("size", SIZES)
def test_random_bytes_follow_from_the_seed_whatever_the_threads(monkeypatch, size):
    made = pieces.random_bytes(size, 1)
    monkeypatch.setattr(pieces, "THREADS", 1)
    assert torch.equal(made, pieces.random_bytes(size, 1)) and made.nbytes == size
    if size > 7:
        assert not torch.equal(made, pieces.random_bytes(size, 2))
        counts = torch.bincount(made.int(), minlength=256)
        assert counts.max() < 3 * size / 256 + 10, "every value as often as any other"
    if size > PIECE:
        assert not torch.equal(made[: size - PIECE], made[PIECE:]), "no two pieces are equal"


@pytest.mark.parametrize("size", SIZES)
def test_adding_one_changes_every_byte_there_and_in_the_file(tmp_path, size):
    path, before = tmp_path / "file", pieces.random_bytes(size, 3)
    path.write_bytes(bytes(size) + b"behind")
    changed = before.clone()
    pieces.add_one(changed)
    assert torch.equal(changed, before + 1), "255 becomes 0"
    pieces.add_one(changed, path)
    assert path.read_bytes() == bytes((before + 2).numpy()) + b"behind"


@pytest.mark.parametrize("size", SIZES)
def test_wrong_bytes_are_counted_and_the_first_one_is_named(tmp_path, size):
    path, expected = tmp_path / "file", pieces.random_bytes(size, 5)
    places = sorted({0, size // 2, size - 1} | {one for one in (PIECE - 1, PIECE) if one < size})
    for first in range(len(places)):
        came = expected.clone()
        came[places[first:]] ^= 0x40
        path.write_bytes(came.numpy())
        due = (len(places) - first, places[first])
        assert pieces.wrong_in_tensor(came, expected) == pieces.wrong_in_file(path, expected) == due
    path.write_bytes(bytes(expected.numpy()) + b"behind")
    assert pieces.wrong_in_tensor(expected.clone(), expected) == pieces.wrong_in_file(path, expected) == (0, None)
    os.truncate(path, size - 1)
    with pytest.raises(EOFError, match=f"it ends at {size - 1:,}"):
        pieces.wrong_in_file(path, expected)


@pytest.mark.gpu
def test_wrong_bytes_on_a_gpu_are_found_too():
    expected = pieces.random_bytes(SIZES[-1], 5)
    came = expected.cuda()
    assert pieces.wrong_in_tensor(came, expected) == (0, None)
    came[[9, PIECE + 1]] ^= 1
    assert pieces.wrong_in_tensor(came, expected) == (2, 9)
