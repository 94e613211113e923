"""Memory that the extension accepts: buffers with bounds, and no access outside them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from gdsdata.io.engine import Output, endings_of, kept_engine, resolved, table_of_one
from gdsdata.io.options import EngineOptions

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def shared():
    return kept_engine(EngineOptions(), resolved("cpu"))


@pytest.fixture
def path(tmp_path):
    (tmp_path / "x").write_bytes(CONTENT)
    return str(tmp_path / "x")


def columns(*rows):
    """Return file, offset, length and place of transfers, from rows of the last three."""
    offset, length, place = np.array(rows, np.int64).reshape(-1, 3).T
    return np.zeros(len(rows), np.int32), offset, length, place


def begin_read(shared, path, rows, memory, **more):
    file, offset, length, place = columns(*rows)
    read = shared.begin_read(table_of_one(path), file, offset, length, memory, place, shared.mark(0), **more)
    assert read.wait(60)
    return read.routes()


def read_many(shared, path, rows, memory):
    file, offset, length, place = columns(*rows)
    return shared.read_many(
        table_of_one(path), file, offset, length, memory, place, False, shared.mark(0), True, stall_timeout_s=60
    )


@pytest.mark.parametrize("make", [lambda: torch.zeros(300, dtype=torch.uint8), lambda: bytearray(300)])
def test_transfers_land_at_their_places_and_leave_the_rest(shared, path, make):
    memory = make()
    begin_read(shared, path, [(0, 100, 1), (1000, 50, 249)], memory)
    expected = bytes(1) + CONTENT[:100] + bytes(148) + CONTENT[1000:1050] + bytes(1)
    assert bytes(memory.numpy() if isinstance(memory, torch.Tensor) else memory) == expected


@pytest.mark.parametrize("call", [begin_read, read_many])
@pytest.mark.parametrize(
    "row", [(0, 101, 0), (0, 1, 100), (0, 2, 99), (0, 1, -1), (0, 1, 2**62), (0, 2**62, 2**62), (0, 0, 101)]
)
def test_a_read_beyond_its_buffer_is_refused_and_nothing_is_written(shared, path, call, row):
    around = torch.zeros(300, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"transfer 1: .* are not within its buffer of 100 bytes"):
        call(shared, path, [(0, 100, 0), row], around[100:200])
    assert not around.any()


def test_a_read_that_widens_elements_needs_memory_for_the_widened_ones(shared, path):
    memory = torch.zeros(80, dtype=torch.uint8)
    begin_read(shared, path, [(1, 10, 0)], memory, conversion="u8_to_i64")
    assert memory.view(torch.int64).tolist() == list(range(1, 11))
    with pytest.raises(ValueError, match="transfer 0: 88 bytes at 0 are not within its buffer of 80 bytes"):
        begin_read(shared, path, [(1, 11, 0)], memory, conversion="u8_to_i64")


def test_each_buffer_of_a_list_bounds_its_own_transfer(shared, path):
    first, second = torch.zeros(10, dtype=torch.uint8), np.zeros(20, np.uint8)
    read_many(shared, path, [(5, 10, 0), (7, 20, 0)], [first, second])
    assert first.tolist() == list(range(5, 15)) and second.tolist() == list(range(7, 27))
    with pytest.raises(ValueError, match="transfer 0: 20 bytes at 0 are not within its buffer of 10 bytes"):
        read_many(shared, path, [(7, 20, 0), (5, 10, 0)], [first, second])
    with pytest.raises(ValueError, match="one for each of 2 transfers, not 1"):
        read_many(shared, path, [(5, 10, 0), (7, 10, 0)], [first])


def test_a_storage_bounds_transfers_too(shared, path):
    storage = torch.UntypedStorage(10)
    read_many(shared, path, [(5, 10, 0)], [storage])
    assert list(storage) == list(range(5, 15))
    with pytest.raises(ValueError, match="are not within its buffer of 10 bytes"):
        read_many(shared, path, [(5, 10, 1)], [storage])


def test_a_tensor_in_another_order_without_gaps_is_a_buffer(shared, path):
    memory = torch.zeros(4, 8, dtype=torch.uint8).T
    shared.read(path, 3, memory, shared.mark(0), True)
    assert memory.T.flatten().tolist() == list(range(3, 35))


@pytest.mark.parametrize(
    ("memory", "error", "says"),
    [
        (torch.zeros(1, dtype=torch.uint8).expand(100), ValueError, "reaches beyond its storage"),
        (bytes(100), ValueError, "cannot be used"),
        (np.zeros((10, 20), np.uint8)[:, ::2], ValueError, "cannot be used"),
        (12345678, TypeError, "an object of type int has no memory"),
        (None, TypeError, "has no memory"),
    ],
)
def test_memory_that_cannot_be_written_without_gaps_is_refused(shared, path, memory, error, says):
    endings = endings_of(shared, threading.Thread())
    calls = [
        lambda: shared.read(path, 0, memory, shared.mark(0), True),
        lambda: begin_read(shared, path, [(0, 100, 0)], memory),
        lambda: shared.begin_range(table_of_one(path), 0, memory, shared.mark(0), True, True, endings, 1),
    ]
    for call in calls:
        with pytest.raises(error, match=says):
            call()
    endings.close()


def test_a_write_beyond_its_buffer_is_refused(shared, tmp_path):
    output = Output(str(tmp_path / "out"), 100)
    for row in [(0, 101, 0), (0, 100, 1), (0, 1, -1)]:
        _, offset, length, place = columns(row)
        with pytest.raises(ValueError, match="are not within its buffer of 100 bytes"):
            output.write(shared, offset, length, bytes(100), place, False, shared.mark(0), True)
    _, offset, length, place = columns((0, 60, 40), (60, 40, 0))
    output.write(shared, offset, length, CONTENT[:100], place, False, shared.mark(0), True)
    output.commit()
    assert (tmp_path / "out").read_bytes() == CONTENT[40:100] + CONTENT[:40]
