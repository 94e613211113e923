"""`SharedReads`: drawn wants of four ranks, with pieces of a few bytes, on both routes."""

import contextlib
import random
import threading
import time

import numpy as np
import pytest
import torch
from test_dcp import on_ranks
from test_read_once import _Event

from gdsdata.collective import agreement, plan, reads, routes, transfers
from gdsdata.collective.plan import NOT_SHARED, FileVersion, Wants
from gdsdata.errors import IoError, RankLost

RANKS, SIZE = 4, 4000
DRAWS = 25


def content_of(path):
    return torch.from_numpy(np.random.default_rng(len(path)).integers(0, 256, SIZE, np.uint8))


class _Memory:
    """Extents in memory, which are read from `content_of`."""

    def __init__(self, wants):
        self.wants = wants
        self.extents = [torch.zeros(size, dtype=torch.uint8) for size in wants.size.tolist()]
        self.read_bytes = 0

    def memories(self, parts):
        columns = zip(*(column.tolist() for column in parts), strict=True)
        return [self.extents[extent][skip : skip + size] for extent, skip, size in columns]

    def read(self, parts):
        for extent, skip, memory in zip(parts.extent, parts.skip, self.memories(parts), strict=True):
            begin = self.wants.offset[extent] + skip
            memory.copy_(content_of(self.wants.files[self.wants.file[extent]].path)[begin : begin + memory.nbytes])
            self.read_bytes += memory.nbytes

    def is_right(self):
        return all(
            torch.equal(memory, content_of(self.wants.files[file].path)[offset : offset + memory.nbytes])
            for memory, file, offset in zip(self.extents, self.wants.file, self.wants.offset, strict=True)
        )


def _drawn(draw):
    files = tuple(FileVersion(path, SIZE, 1) for path in draw.sample(["/a", "/bb", "s3://b/ccc"], draw.randint(1, 3)))
    rows, at = [], 0
    for _ in range(draw.choice([0, 3, 30])):
        size = draw.choice([0, draw.randint(1, 20), draw.randint(1, 400)])
        at = draw.choice([at, draw.randint(0, SIZE)]) if at + size < SIZE else 0
        rows.append((draw.randrange(len(files)), at, size, draw.choice([0, 0, 1, 1, NOT_SHARED]), draw.random() < 0.2))
        at += size
    rows = [row for row in rows if row[1] + row[2] <= SIZE]
    columns = list(zip(*rows, strict=True)) or [()] * 5
    types = (np.int32, np.int64, np.int64, np.int8, bool)
    return Wants(files, *(np.array(column, kind) for column, kind in zip(columns, types, strict=True)))


@contextlib.contextmanager
def _small_pieces(rank):
    """Have pieces of a few bytes, and the CPU's tensors take the way of a GPU's too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_MIB", 64)
        patch.setattr(plan, "PACKED_BYTES", 60)
        for module in (plan, transfers):
            patch.setattr(module, "SHORT_BYTES", 16)
        patch.setattr(transfers, "_READERS_AT_A_TIME", 2)
        patch.setattr(reads, "_PRIVATE_BYTES", 100)
        patch.setattr(routes, "reaches_gpus", lambda session: True)
        patch.setattr(routes, "number_of_gpu", lambda device: 1 + rank)
        patch.setattr(routes, "current_gpu", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(agreement, "node_name", lambda: f"node {rank // 2}")
        yield


def _read_what_is_drawn(rank, folder):
    common, own = random.Random(1), random.Random(100 + rank)
    with _small_pieces(rank):
        for number in range(DRAWS):
            same, once = common.choice([True, False]), common.choice(["node", "job", None])
            with transfers.reads_together("auto", once, {"call": "test"}, 60) as together:
                for _ in range(1 if same else own.randint(0, 3)):
                    wants = _drawn(random.Random(number) if same else own)
                    memory = _Memory(wants)
                    together.read(wants, memory, torch.device("cpu"))
                    assert memory.is_right(), number
    return True


def test_drawn_wants_are_read_and_passed_on(tmp_path):
    assert on_ranks(RANKS, _read_what_is_drawn, tmp_path) == [True] * RANKS


def _wants_of(path, size=SIZE):
    one = np.zeros(1, np.int64)
    return Wants((FileVersion(path, SIZE, 1),), one.astype(np.int32), one, one + size, one.astype(np.int8), one > 0)


class _Announced(_Memory):
    """Says in a file that it has read."""

    def __init__(self, wants, file):
        super().__init__(wants)
        self._file = file

    def read(self, parts):
        super().read(parts)
        self._file.touch()


def _come_late(rank, folder):
    """Have rank 1 begin when rank 0 has read, or late. Return whether it has, and three counts.

    They are the bytes that this rank read: of what both want, and twice of files that one wants.
    """
    with transfers.reads_together("auto", None, {"call": "connect"}, 60):
        pass
    counts, until = [], time.monotonic() + 20
    while rank == 1 and not (folder / "read").exists() and time.monotonic() < until:
        time.sleep(0.001)
    with _small_pieces(rank), transfers.reads_together("auto", None, {"call": "test"}, 60) as together:
        for path in ("/a", f"/{'b' * (1 + rank)}", f"/{'c' * (1 + rank)}"):
            memory = _Announced(_wants_of(path), folder / "read")
            together.read(memory.wants, memory, None)
            assert memory.is_right()
            counts.append(memory.read_bytes)
    return time.monotonic() < until, *counts


def test_a_rank_begins_to_read_before_the_others_have_come(tmp_path):
    found = on_ranks(2, _come_late, tmp_path)
    assert all(in_time for in_time, *_ in found)
    assert sum(same for _, same, _, _ in found) == SIZE
    for _, _, different, again in found:
        piece = different - SIZE  # read as if the other rank wanted it too
        assert 0 < piece <= SIZE / 4
        assert again == SIZE


class _Blocked:
    """Reads nothing until it may."""

    def __init__(self):
        self.may, self.begun, self.ended = threading.Event(), 0, 0

    def read(self, parts):
        self.begun += 1
        assert self.may.wait(20)
        self.ended += 1


class _OneRank:
    rank = 0

    def wait(self, is_done):
        while not is_done(1):
            pass


def test_reads_that_are_dropped_have_ended_or_never_begin():
    schedule = plan.schedule_of([_wants_of("/a", 40 * plan.PIECE_BYTES)], [0, 0], [0, 1], 0)
    reader = _Blocked()
    with reads.ScheduledReads(_OneRank(), schedule, reader) as its:
        its.begin()
        timer = threading.Timer(0.3, reader.may.set)
        timer.start()
        its.drop()
        assert reader.may.is_set() and reader.begun == reader.ended == reads._READS_AT_A_TIME
        timer.join()
    assert reader.begun == reads._READS_AT_A_TIME


class _Failing(_Memory):
    """Fails at a drawn call, if ``fails`` names it."""

    def __init__(self, wants, fails, draw):
        super().__init__(wants)
        self._left = {fails: draw.randrange(3)}

    def _count(self, name):
        self._left[name] = self._left.get(name, -1) - 1
        if self._left[name] == -1:
            raise IoError(5, f"a {name} fails", "/a", 3, 4)

    def read(self, parts):
        self._count("read")
        super().read(parts)

    def memories(self, parts):
        self._count("transfer")
        return super().memories(parts)


def _fail_where_it_is_drawn(rank, folder):
    common, seen = random.Random(3), []
    with _small_pieces(rank):
        for number in range(DRAWS):
            fails = common.choice(["read", "transfer"])
            rank_that_fails, wants = common.randrange(RANKS), _drawn(random.Random(number))
            # gloo in the place of NCCL would wait in the transfer that fails, and not behind it
            wants = wants._replace(route=np.minimum(wants.route, routes.CPU))
            memory = _Failing(wants, fails if rank == rank_that_fails else "", random.Random(number))
            try:
                with transfers.reads_together("auto", None, {"call": "test"}, 60) as together:
                    together.read(wants, memory, torch.device("cpu"))
                assert memory.is_right()
                seen.append("")
            except (IoError, RankLost) as error:
                assert rank != rank_that_fails or (type(error), error.length) == (IoError, 4)
                seen.append(type(error).__name__)
    return seen


def test_ranks_that_fail_anywhere_leave_a_group_that_works(tmp_path):
    """A read that fails has its error on all ranks; a transfer that fails, or `RankLost`."""
    for of_draw in zip(*on_ranks(RANKS, _fail_where_it_is_drawn, tmp_path), strict=True):
        assert set(of_draw) <= {"IoError", "RankLost"} or set(of_draw) == {""}
