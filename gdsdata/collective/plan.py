"""The schedule of reads and transfers: each rank computes the same one from the wants of all.

Extents of all ranks are cut where another rank's begin or end. Parts that one rank wants, it reads
by itself. Parts that several want are put into pieces, and one of those ranks reads each piece.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gdsdata.distinct import distinct
from gdsdata.errors import CorruptData

_MIB = 1 << 20
# A piece has at most this many bytes, so that reading one overlaps with sending the one before. A
# round of pieces takes the ranks some 2 ms of agreement and calls, as long as reading 64 MiB (two
# H100, 2026-11-26). Records that are compared with a checksum are never cut.
PIECE_BYTES = 128 * _MIB
# Parts that are shorter are packed, and a piece has at most so many bytes of those. Longer ones are
# sent from where they are read to where they are wanted.
SHORT_BYTES, PACKED_BYTES = _MIB, 16 * _MIB
# A rank reads at least so many pieces if the file is long enough, so that all read equally much.
_PIECES_A_READER = 4
_BITS = 30  # of the wants that are combined at a time

_ROUTE_BYTES = 1 << 60  # of the space that has all files

NOT_SHARED = -1  # a route


class FileVersion(NamedTuple):
    """A file as a rank sees it: its absolute path or URL, its size, and its time or version."""

    path: str
    size_bytes: int
    version: int


class Wants(NamedTuple):
    """The extents that one rank wants to read.

    Attributes:
        files: those that it reads from.
        file: int32, the file of each extent.
        offset, size: int64, where it lies in the file.
        route: int8, the kind of memory it is read to. Ranks share what they want by one route.
            `NOT_SHARED`: the rank reads it by itself.
        whole: bool, true of a record whose checksum is compared, and which is not cut.
    """

    files: tuple[FileVersion, ...]
    file: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    route: np.ndarray
    whole: np.ndarray

    @classmethod
    def nothing(cls) -> Wants:
        empty = np.empty(0, np.int64)
        return cls((), empty.astype(np.int32), empty, empty, empty.astype(np.int8), empty.astype(bool))

    def packed(self) -> bytes:
        """Return the wants as bytes, for another rank."""
        columns = (self.file, self.offset, self.size, self.route, self.whole)
        return pickle.dumps((tuple(map(tuple, self.files)), [one.tobytes() for one in columns]))

    @classmethod
    def unpacked(cls, content: bytes) -> Wants:
        files, columns = pickle.loads(content)
        types = (np.int32, np.int64, np.int64, np.int8, np.bool_)
        arrays: list[Any] = [np.frombuffer(column, kind) for column, kind in zip(columns, types, strict=True)]
        return cls(tuple(FileVersion(*one) for one in files), *arrays)

    def has_route(self, route: int) -> bool:
        return bool((self.route == route).any())

    def digest(self) -> tuple[int, int]:
        """Return two numbers that other wants do not have."""
        hashed = hashlib.blake2b(repr(self.files).encode(), digest_size=16)
        for column in (self.file, self.offset, self.size, self.route, self.whole):
            hashed.update(np.ascontiguousarray(column).data)
        both = np.frombuffer(hashed.digest(), np.int64)
        return int(both[0]), int(both[1])


class Parts(NamedTuple):
    """Parts of a rank's extents: which extent, from which byte of it on, and how many bytes."""

    extent: np.ndarray
    skip: np.ndarray
    size: np.ndarray


class Piece(NamedTuple):
    """Bytes that one rank reads and others get.

    Attributes:
        round: the pieces of a round are sent at the same time, one of each reader.
        number: of the piece among all pieces.
        reader: the rank that reads it.
        ranks: those that want it, the reader among them.
        route: see `Wants`.
        parts: of this rank's extents, in an order that is the same on all ranks.
    """

    round: int
    number: int
    reader: int
    ranks: tuple[int, ...]
    route: int
    parts: Parts


class Schedule(NamedTuple):
    """The work of one rank.

    Attributes:
        private: the parts that it reads by itself.
        pieces: those that it reads or gets, by round and number.
        rounds: how many there are; ranks of another node may have others.
    """

    private: Parts
    pieces: list[Piece]
    rounds: int


def hops_of(piece: Piece, nodes: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the transfers of a piece: (sender, receiver), first and afterwards.

    The reader sends to the ranks of its own node, and to one rank of each other node, which passes
    it on. So a piece crosses the network once for each node.
    """
    on_node: dict[int, list[int]] = {}
    for rank in piece.ranks:
        on_node.setdefault(nodes[rank], []).append(rank)
    first, afterwards = [], []
    for node, ranks in on_node.items():
        if node == nodes[piece.reader]:
            first += [(piece.reader, rank) for rank in ranks if rank != piece.reader]
        else:
            delegate = ranks[piece.number % len(ranks)]
            first.append((piece.reader, delegate))
            afterwards += [(delegate, rank) for rank in ranks if rank != delegate]
    return first, afterwards


def schedule_of(
    wants: Sequence[Wants], kind_of_rank: Sequence[int], ranks: Sequence[int], rank: int, piece_bytes: int = PIECE_BYTES
) -> Schedule:
    """Return the work of ``rank``.

    Args:
        wants: the different wants.
        kind_of_rank: for each rank the place of its wants in ``wants``.
        ranks: those that share reads, in order; ``rank`` is one of them.
        rank: this one.
        piece_bytes: the most bytes of a piece.

    Raises:
        CorruptData: ranks see different versions of a file.
    """
    kinds = sorted({kind_of_rank[one] for one in ranks})
    placed = _placed([wants[kind] for kind in kinds])
    cuts, sets = _segmented(placed)
    ranks_of_set = [
        tuple(one for one in ranks if kinds.index(kind_of_rank[one]) in members) for members in sets.members
    ]
    sizes = np.diff(cuts)
    # Segments that several ranks want.
    shared = np.array([len(those) for those in ranks_of_set], np.int64)[sets.of_segment] > 1
    load = {one: int(placed[kinds.index(kind_of_rank[one])].size_alone) for one in ranks}
    of_sets = np.bincount(sets.of_segment, sizes, len(ranks_of_set))
    for those, size in zip(ranks_of_set, of_sets.tolist(), strict=True):
        if len(those) == 1:
            load[those[0]] += int(size)

    a_piece = int(sizes[shared].sum()) // (len(ranks) * _PIECES_A_READER)
    piece_bytes = min(piece_bytes, max(SHORT_BYTES, -(-a_piece // _MIB) * _MIB))
    mine = placed[kinds.index(kind_of_rank[rank])]
    chunks = _chunks(cuts, sets, shared, piece_bytes)
    return Schedule(_private(mine, cuts, shared), *_pieces(chunks, piece_bytes, ranks_of_set, load, mine, rank))


# ------------------------------------------------------------------------------------------------ segments


class _Placed(NamedTuple):
    """Extents of one kind of wants in one space, which has all files by each route.

    Attributes:
        extent: the places in the wants, in the order of the space.
        begin, size: in the space.
        whole: as in `Wants`.
        may_share: false if the ranks read it by themselves, whether others want it or not.
    """

    extent: np.ndarray
    begin: np.ndarray
    size: np.ndarray
    whole: np.ndarray
    may_share: np.ndarray

    @property
    def end(self) -> np.ndarray:
        return self.begin + self.size

    @property
    def size_alone(self) -> int:
        return int(self.size[~self.may_share].sum())


class _Sets(NamedTuple):
    """Which segments which wants have in common.

    Attributes:
        of_segment: the number of its set for each segment.
        members: of each set; nobody wants what lies between extents.
        whole: whether a segment must not be cut.
    """

    of_segment: np.ndarray
    members: list[tuple[int, ...]]
    whole: np.ndarray


def check_versions(wants: Sequence[Wants]) -> None:
    """Check that all see the same version of each file.

    Raises:
        CorruptData: they do not; the message has both versions.
    """
    seen: dict[str, FileVersion] = {}
    for file in (file for one in wants for file in one.files):
        first = seen.setdefault(file.path, file)
        if first != file:
            raise CorruptData(
                f"'{file.path}' differs between the ranks that read it together: {first.size_bytes} bytes of version "
                f"{first.version}, and {file.size_bytes} bytes of version {file.version}. It was replaced or changed "
                'meanwhile: load it again; or it is another file on each node: pass once="node"',
                file.path,
                0,
                file.size_bytes,
            )


def _placed(wants: Sequence[Wants]) -> list[_Placed]:
    """Put the extents of all wants into one space."""
    check_versions(wants)
    paths = {path: i for i, path in enumerate(dict.fromkeys(file.path for one in wants for file in one.files))}
    room, of_extents = np.zeros(len(paths), np.int64), []
    for one in wants:
        its_files = np.array([paths[file.path] for file in one.files], np.int64)
        of_extents.append(its_files[one.file])
        np.maximum.at(room, of_extents[-1], one.offset + one.size)
    room = -(-room // _MIB) * _MIB  # files begin at whole pages
    base = np.cumsum(room) - room
    placed = []
    for one, of_extent in zip(wants, of_extents, strict=True):
        begin = base[of_extent] + one.offset + np.where(one.route == NOT_SHARED, 0, one.route * np.int64(_ROUTE_BYTES))
        order = np.lexsort((-one.size, begin))
        begin, size = begin[order], one.size[order]
        # Bytes that a rank wants twice are read once for all, and again by itself.
        can_share = (one.route[order] != NOT_SHARED) & (size > 0)
        ends = np.maximum.accumulate(np.where(can_share, begin + size, 0)) if len(size) else size
        is_again = np.zeros(len(size), bool)
        is_again[1:] = begin[1:] < ends[:-1]
        placed.append(_Placed(order, begin, size, one.whole[order], can_share & ~is_again))
    return _without_cut_records(placed)


def _without_cut_records(placed: list[_Placed]) -> list[_Placed]:
    """Have ranks read records by themselves that other extents would cut."""
    if not any(one.whole.any() for one in placed) or len(placed) == 1:
        return placed
    while True:
        cuts = _cuts(placed)
        found = []
        for one in placed:
            inside = np.searchsorted(cuts, one.end, "left") - np.searchsorted(cuts, one.begin, "right")
            found.append(one._replace(may_share=one.may_share & ~(one.whole & (inside > 0))))
        if all((a.may_share == b.may_share).all() for a, b in zip(placed, found, strict=True)):
            return found
        placed = found


def _cuts(placed: Sequence[_Placed]) -> np.ndarray:
    """Return all places at which an extent that may be shared begins or ends, in order."""
    return distinct(np.concatenate([part[one.may_share] for one in placed for part in (one.begin, one.end)]))


def _segmented(placed: Sequence[_Placed]) -> tuple[np.ndarray, _Sets]:
    """Cut the space at all ends of extents. Returns the cuts, and what lies between two of them."""
    cuts = _cuts(placed)
    count = max(len(cuts) - 1, 0)
    labels, bits = np.zeros(count, np.int64), []
    whole = np.zeros(count, bool)
    for start in range(0, len(placed), _BITS):
        for shift, one in enumerate(placed[start : start + _BITS]):
            first = np.searchsorted(cuts, one.begin[one.may_share])
            covered = _covered(first, np.searchsorted(cuts, one.end[one.may_share]), count)
            labels |= covered.astype(np.int64) << shift
            bits.append(np.packbits(covered))
            whole[first[one.whole[one.may_share]]] = True
        found, labels = np.unique(labels, return_inverse=True)
        labels = labels.astype(np.int64) << _BITS
    labels >>= _BITS
    example = np.zeros(len(found), np.int64)
    example[labels] = np.arange(count)
    members = [
        tuple(kind for kind, row in enumerate(bits) if row[at >> 3] >> (7 - (at & 7)) & 1) for at in example.tolist()
    ]
    return cuts, _Sets(labels, members, whole)


def _covered(first: np.ndarray, last: np.ndarray, count: int) -> np.ndarray:
    steps = np.bincount(first, minlength=count + 1) - np.bincount(last, minlength=count + 1)
    return np.cumsum(steps)[:count] > 0


def _private(mine: _Placed, cuts: np.ndarray, shared: np.ndarray) -> Parts:
    """Return the parts of a rank's extents that it alone reads, joined within an extent."""
    alone = ~mine.may_share & (mine.size > 0)
    parts = [Parts(mine.extent[alone], np.zeros(alone.sum(), np.int64), mine.size[alone])]
    begin, extent = mine.begin[mine.may_share], mine.extent[mine.may_share]
    if len(begin):
        first, last = np.searchsorted(cuts, begin), np.searchsorted(cuts, mine.end[mine.may_share])
        owner = np.repeat(np.arange(len(begin)), last - first)
        segment = _ranges(first, last)
        keep = ~shared[segment]
        owner, segment = owner[keep], segment[keep]
        if len(segment):
            is_new = np.ones(len(segment), bool)
            is_new[1:] = (owner[1:] != owner[:-1]) | (segment[1:] != segment[:-1] + 1)
            at, end = np.flatnonzero(is_new), np.append(np.flatnonzero(is_new)[1:], len(segment)) - 1
            skip = cuts[segment[at]] - begin[owner[at]]
            parts.append(Parts(extent[owner[at]], skip, cuts[segment[end] + 1] - cuts[segment[at]]))
    return Parts(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _ranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the numbers from each ``first`` to before ``last``, one range behind the other."""
    lengths = last - first
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - lengths), lengths)


# ------------------------------------------------------------------------------------------------ pieces


class _Chunks(NamedTuple):
    """Segments that several ranks want, cut to at most a piece's size, by set and place."""

    begin: np.ndarray
    size: np.ndarray
    set: np.ndarray


def _chunks(cuts: np.ndarray, sets: _Sets, shared: np.ndarray, piece_bytes: int) -> _Chunks:
    segment = np.flatnonzero(shared)
    begin, end = cuts[segment], cuts[segment + 1]
    # Longer ones are cut at multiples of a piece's size, so that direct I/O finds whole pages.
    is_cut = ~sets.whole[segment] & (end - begin > piece_bytes)
    count = np.where(is_cut, -(-end // piece_bytes) - begin // piece_bytes, 1)
    owner = np.repeat(np.arange(len(segment)), count)
    number = _ranges(np.zeros(len(count), np.int64), count)
    at = np.where(number == 0, begin[owner], (begin[owner] // piece_bytes + number) * piece_bytes)
    to = np.where(number == count[owner] - 1, end[owner], (begin[owner] // piece_bytes + number + 1) * piece_bytes)
    order = np.lexsort((at, sets.of_segment[segment][owner]))
    return _Chunks(at[order], (to - at)[order], sets.of_segment[segment][owner[order]])


def _pieces(
    chunks: _Chunks,
    piece_bytes: int,
    ranks_of_set: Sequence[tuple[int, ...]],
    load: dict[int, int],
    mine: _Placed,
    rank: int,
) -> tuple[list[Piece], int]:
    """Return the pieces of a rank, and the number of rounds.

    The reader of a piece is the one that has the least to read so far.
    """
    ends = list(_ends_of_pieces(chunks, piece_bytes))
    begins = [0, *ends][: len(ends)]
    sums = np.concatenate([[0], np.cumsum(chunks.size)])
    load = dict(load)
    begun = dict.fromkeys(load, 0)
    begin, extent = mine.begin[mine.may_share], mine.extent[mine.may_share]
    owner = begin.searchsorted(chunks.begin, "right") - 1  # of chunks that this rank wants
    first_byte, first_set = chunks.begin[begins].tolist(), chunks.set[begins].tolist()
    pieces = []
    for number, piece in enumerate(sorted(range(len(ends)), key=first_byte.__getitem__)):
        first, last = begins[piece], ends[piece]
        ranks = ranks_of_set[first_set[piece]]
        reader = min(ranks, key=load.__getitem__)
        load[reader] += int(sums[last] - sums[first])
        round_, begun[reader] = begun[reader], begun[reader] + 1
        if rank in ranks:
            its = owner[first:last]
            parts = Parts(extent[its], chunks.begin[first:last] - begin[its], chunks.size[first:last])
            pieces.append(Piece(round_, number, reader, ranks, first_byte[piece] // _ROUTE_BYTES, parts))
    pieces.sort(key=lambda piece: (piece.round, piece.number))
    return pieces, max(begun.values(), default=0)


def _ends_of_pieces(chunks: _Chunks, piece_bytes: int) -> Iterator[int]:
    """Yield where each piece ends in the chunks."""
    count = len(chunks.size)
    routes = chunks.begin // _ROUTE_BYTES
    changes = (chunks.set[1:] != chunks.set[:-1]) | (routes[1:] != routes[:-1])
    ends_of_sets = np.append(np.flatnonzero(changes) + 1, count)
    sums = np.cumsum(chunks.size)
    shorts = np.cumsum(np.where(chunks.size < SHORT_BYTES, chunks.size, 0))
    at = 0
    while at < count:
        before, short_before = (int(sums[at - 1]), int(shorts[at - 1])) if at else (0, 0)
        end = min(
            int(sums.searchsorted(before + piece_bytes, "right")),
            int(shorts.searchsorted(short_before + PACKED_BYTES, "right")),
            int(ends_of_sets[ends_of_sets.searchsorted(at, "right")]),
        )
        at = max(end, at + 1)
        yield at
