"""The plan of reads that ranks share, by a simulation of all ranks."""

import time
from collections import Counter, defaultdict
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsdata.collective import plan
from gdsdata.collective.plan import NOT_SHARED, FileVersion, Wants, check_versions, hops_of, schedule_of
from gdsdata.collective.transfers import _short_bytes, _waves
from gdsdata.errors import CorruptData

KIB, MIB = 2**10, 2**20


def wants_of(extents, files=("a", "b")):
    """Return wants of tuples (file, offset, size), and optionally route and whole."""
    rows = [(*one, 0, False)[:5] if len(one) == 3 else one for one in extents]
    columns = list(zip(*rows, strict=True)) or [()] * 5
    types = (np.int32, np.int64, np.int64, np.int8, bool)
    versions = tuple(FileVersion(path, 1 << 40, 7) for path in files)
    return Wants(versions, *(np.array(column, kind) for column, kind in zip(columns, types, strict=True)))


def bytes_at(wants, parts):
    """Return the bytes of parts of extents as tuples (file, begin, end)."""
    begin = wants.offset[parts.extent] + parts.skip
    return list(zip(wants.file[parts.extent].tolist(), begin.tolist(), (begin + parts.size).tolist(), strict=True))


def simulate(wants, kinds, ranks, nodes, piece_bytes):
    """Carry out the schedules of all ranks, compare what they do, and return what each reads."""
    schedules = {rank: schedule_of(wants, kinds, ranks, rank, piece_bytes) for rank in ranks}
    assert len({schedule.rounds for schedule in schedules.values()}) == 1
    reads, has = defaultdict(Counter), {rank: {} for rank in ranks}

    def put(rank, parts):
        """Mark the bytes of a rank's extents as in place; nothing is written twice."""
        for extent, skip, size in zip(*(column.tolist() for column in parts), strict=True):
            memory = has[rank].setdefault(extent, np.zeros(wants[kinds[rank]].size[extent], bool))
            assert not memory[skip : skip + size].any() and skip + size <= len(memory)
            memory[skip : skip + size] = True

    pieces = defaultdict(dict)
    for rank, schedule in schedules.items():
        its = wants[kinds[rank]]
        put(rank, schedule.private)
        reads[rank].update(bytes_at(its, schedule.private))
        assert [(p.round, p.number) for p in schedule.pieces] == sorted((p.round, p.number) for p in schedule.pieces)
        for piece in schedule.pieces:
            pieces[piece.number][rank] = piece
    readers_of_round = Counter()
    for of_rank in pieces.values():
        one = next(iter(of_rank.values()))
        assert set(of_rank) == set(one.ranks) and len(one.ranks) > 1 and 0 <= one.round < schedules[ranks[0]].rounds
        assert len({(p.round, p.reader, p.ranks, p.route) for p in of_rank.values()}) == 1
        content = {tuple(bytes_at(wants[kinds[rank]], piece.parts)) for rank, piece in of_rank.items()}
        assert len(content) == 1  # all ranks have the same bytes in the same order
        assert all(
            wants[kinds[r]].route[p.parts.extent].tolist() == [one.route] * len(p.parts.size)
            for r, p in of_rank.items()
        )
        readers_of_round[one.round, one.reader] += 1
        has_piece = {one.reader}
        reads[one.reader].update(content.pop())
        first, afterwards = hops_of(one, nodes)
        crossed = Counter()
        for hop in (first, afterwards):
            assert all(sender in has_piece for sender, _ in hop)
            for sender, receiver in hop:
                assert receiver not in has_piece
                has_piece.add(receiver)
                if nodes[sender] != nodes[receiver]:
                    crossed[nodes[receiver]] += 1
        assert has_piece == set(one.ranks)
        assert all(count == 1 for count in crossed.values())
        for rank, piece in of_rank.items():
            put(rank, piece.parts)
    assert all(count == 1 for count in readers_of_round.values())
    for rank in ranks:
        its = wants[kinds[rank]]
        assert {extent for extent, size in enumerate(its.size.tolist()) if size} == set(has[rank])
        assert all(memory.all() for memory in has[rank].values())
    return reads, pieces


def read_bytes(reads):
    return {rank: sum(count * (end - begin) for (_, begin, end), count in of.items()) for rank, of in reads.items()}


extent = st.tuples(
    st.integers(0, 1), st.integers(0, 60), st.integers(0, 25), st.sampled_from([0, 0, 0, 1, NOT_SHARED]), st.booleans()
)


@given(
    st.lists(st.lists(extent, max_size=8), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6),
    st.integers(1, 30),
)
@settings(max_examples=300, deadline=None)
def test_every_rank_gets_every_byte_it_wants_and_sends_only_what_it_has(extents, ranks, piece_bytes):
    wants = [wants_of(one) for one in extents]
    kinds, nodes = [kind % len(wants) for kind, _ in ranks], [node for _, node in ranks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHORT_BYTES", 5)
        patch.setattr(plan, "PACKED_BYTES", 9)
        patch.setattr(plan, "_MIB", 10)
        simulate(wants, kinds, list(range(len(ranks))), nodes, piece_bytes)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(1, 25)), max_size=6),
        min_size=2,
        max_size=4,
    )
)
@settings(max_examples=200, deadline=None)
def test_each_byte_is_read_once_if_no_rank_wants_it_twice(extents):
    wants = []
    for one in extents:  # no overlaps within a rank
        taken, kept = set(), []
        for file, offset, size in one:
            its = {(file, at) for at in range(offset, offset + size)}
            if not its & taken:
                taken |= its
                kept.append((file, offset, size))
        wants.append(wants_of(kept))
    ranks = list(range(len(wants)))
    reads, _ = simulate(wants, ranks, ranks, [0] * len(ranks), 7)
    counts = Counter(
        (file, at) for of in reads.values() for file, begin, end in of.elements() for at in range(begin, end)
    )
    assert all(count == 1 for count in counts.values())


def test_replicas_read_equal_shares_in_pieces():
    extents = [(0, i * 3 * MIB, 3 * MIB) for i in range(100)]
    reads, pieces = simulate([wants_of(extents)], [0] * 4, [0, 1, 2, 3], [0] * 4, plan.PIECE_BYTES)
    shares = read_bytes(reads)
    assert sum(shares.values()) == 300 * MIB
    largest = max(int(one.parts.size.sum()) for of in pieces.values() for one in of.values())
    assert largest <= plan.PIECE_BYTES
    assert max(shares.values()) - min(shares.values()) <= largest


def test_extents_that_fit_into_a_piece_are_not_cut_and_longer_ones_at_whole_pages():
    header = 5000
    fits = wants_of([(0, header + i * 3 * MIB, 3 * MIB) for i in range(40)])
    schedule = schedule_of([fits], [0, 0], [0, 1], 0, 4 * MIB)
    assert sorted(np.concatenate([piece.parts.extent for piece in schedule.pieces]).tolist()) == list(range(40))
    longer = wants_of([(0, header, 40 * MIB)])
    schedule = schedule_of([longer], [0, 0], [0, 1], 0, 4 * MIB)
    begins = sorted(np.concatenate([header + piece.parts.skip for piece in schedule.pieces]).tolist())
    assert begins == [header, *range(4 * MIB, 41 * MIB, 4 * MIB)]


def test_short_parts_are_packed_within_their_bound():
    extents = [(0, i * 10 * KIB, 10 * KIB) for i in range(8000)]
    _, pieces = simulate([wants_of(extents)], [0] * 2, [0, 1], [0, 0], plan.PIECE_BYTES)
    sizes = [int(next(iter(of.values())).parts.size.sum()) for of in pieces.values()]
    assert max(sizes) <= plan.PACKED_BYTES and len(sizes) < 20


def test_the_packed_parts_of_many_readers_stay_within_their_bound():
    ranks = list(range(24))
    wants = [wants_of([(0, i * 10 * KIB, 10 * KIB) for i in range(60_000)])]
    schedule = schedule_of(wants, [0] * len(ranks), ranks, 5)
    waves = [wave for _, its in groupby(schedule.pieces, lambda piece: piece.round) for wave in _waves(list(its))]
    packed = [sum(map(_short_bytes, wave)) for wave in waves]
    assert sum(packed) == 60_000 * 10 * KIB
    assert max(packed) <= 128 * MIB and max(map(len, waves)) == 8


def test_records_with_checksums_are_never_cut():
    whole = [(0, 0, 200 * MIB, 0, True), (0, 200 * MIB, 3 * MIB, 0, True)]
    part = [(0, 150 * MIB, 20 * MIB, 0, False), (0, 200 * MIB, 3 * MIB, 0, True)]
    reads, _ = simulate([wants_of(whole), wants_of(part)], [0, 0, 1], [0, 1, 2], [0] * 3, plan.PIECE_BYTES)
    assert reads[0][0, 0, 200 * MIB] == reads[1][0, 0, 200 * MIB] == 1, (
        "each is read by itself, because rank 2 would cut it"
    )
    assert sum(of[0, 200 * MIB, 203 * MIB] for of in reads.values()) == 1
    reads, _ = simulate([wants_of(whole)], [0, 0, 0], [0, 1, 2], [0] * 3, plan.PIECE_BYTES)
    assert sum(of[0, 0, 200 * MIB] for of in reads.values()) == 1


def test_private_reads_count_for_the_balance():
    common = [(0, i * MIB, MIB) for i in range(64)]
    reads, _ = simulate([wants_of(common), wants_of([*common, (1, 0, 32 * MIB)])], [0, 1], [0, 1], [0, 0], 4 * MIB)
    assert abs(read_bytes(reads)[0] - read_bytes(reads)[1]) <= 4 * MIB


def test_versions_that_differ_are_an_error_with_both():
    old, new = (FileVersion("a", 10, 1),), (FileVersion("a", 12, 2),)
    wants = wants_of([(0, 0, 10)], files=["a"])
    with pytest.raises(CorruptData, match="10 bytes of version 1, and 12 bytes of version 2"):
        check_versions([wants._replace(files=old), wants._replace(files=new)])


def test_wants_are_the_same_after_a_journey():
    wants = wants_of([(0, 5, 6, 1, True), (1, 7, 8, NOT_SHARED, False)])
    again = Wants.unpacked(wants.packed())
    assert again.digest() == wants.digest() != wants_of([(0, 5, 6, 1, False), (1, 7, 8, NOT_SHARED, False)]).digest()
    assert again.files == wants.files
    assert Wants.nothing().digest() != wants.digest()


@pytest.mark.parametrize("kinds", [1, 8])
def test_plans_of_many_extents_are_quick(kinds):
    count = 200_000
    offset = np.arange(count) * 5000
    wants = []
    for kind in range(kinds):  # each wants a third of its own, and the rest in common
        its = offset if kinds == 1 else offset[(np.arange(count) % 3 != 0) | (np.arange(count) // 3 % kinds == kind)]
        zeros = np.zeros(len(its), np.int32)
        wants.append(
            Wants((FileVersion("a", 1 << 40, 0),), zeros, its, zeros + np.int64(5000), zeros.astype(np.int8), zeros > 0)
        )
    began = time.process_time()
    schedule = schedule_of(wants, list(range(kinds)) if kinds > 1 else [0] * 8, list(range(8)), 3)
    seconds = time.process_time() - began
    print(f"{kinds} kinds: {seconds * 1e3:.0f} ms, {schedule.rounds} rounds")
    assert seconds < 3
