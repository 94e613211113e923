"""`Blend` and `MixedOrder`: the source of each turn of a `Mix`, by arithmetic on its position."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np

from gdsdata.data.order.permutation import as_array

# Positions whose sources are computed together.
_WINDOW = 4096
# A share is a multiple of 2 ** -31, so that all arithmetic is exact in int64 and alike on every
# machine.
_SHARE_BITS = 31
_HALF = 1 << (_SHARE_BITS - 1)
_MASK = (1 << _SHARE_BITS) - 1

# A number of turns, or one for each of some positions (int64).
_Turns = TypeVar("_Turns", int, np.ndarray)


class _Fork(NamedTuple):
    """A node that shares the turns that come to it between two others."""

    left_share: int  # of 2 ** _SHARE_BITS
    left: _Fork | int
    right: _Fork | int


class Blend:
    """An endless order of K sources, in which each has its share at every prefix.

    It is computed at any position. It is a tree, as Huffman's code builds it, with a source at each
    leaf. The left side of a fork has had ``n * share`` of the first n turns that come to the fork,
    rounded to the nearest whole number. So at one fork no side is more than half a turn ahead or
    behind, and a source sees its own share alone of the errors further up. A source of weight w
    with nodes of weights W above it (the root left out) stays within ``(1 + sum(w / W)) / 2`` turns
    of its due. In a tree of Huffman's the nodes upwards grow at least as Fibonacci's numbers do. So
    that is less than 1.68 whatever the weights are, and less than 1 for three sources.

    Args:
        weights: finite, at least 0, not all 0. They need no sum of 1.

    Raises:
        ValueError: they are not.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise ValueError(f"weights={list(weights)}: they are finite, at least 0, and not all 0")
        self._sources = len(weights)
        number = count()  # so that nodes are never compared, and equal weights keep their order
        largest = max(weights)  # divided by, lest a sum be infinite
        nodes: list[tuple[float, int, _Fork | int]] = [
            (weight / largest, next(number), source) for source, weight in enumerate(weights) if weight
        ]
        heapq.heapify(nodes)
        while len(nodes) > 1:
            (light, _, left), (heavy, _, right) = heapq.heappop(nodes), heapq.heappop(nodes)
            share = max(1, round(light / (light + heavy) * 2**_SHARE_BITS))  # however light, it has its turn some time
            heapq.heappush(nodes, (light + heavy, next(number), _Fork(share, left, right)))
        self._root = nodes[0][2]

    def counts(self, position: int) -> list[int]:
        """Return how often each source is among the first ``position``."""
        counts = [0] * self._sources
        nodes = [(self._root, position)]
        while nodes:
            node, turns = nodes.pop()
            if isinstance(node, _Fork):
                left = _left_turns(node, turns)
                nodes += [(node.left, left), (node.right, turns - left)]
            else:
                counts[node] = turns
        return counts

    def sources(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source at each position, and how many turns it has had.

        Args:
            positions: int64 (m,).

        Returns:
            int64 (m,) each.
        """
        sources, turns = np.empty_like(positions), positions.copy()
        nodes: list[tuple[_Fork | int, np.ndarray]] = [(self._root, np.arange(len(positions)))]
        while nodes:
            node, here = nodes.pop()
            if isinstance(node, _Fork):
                left = _left_turns(node, turns[here])
                is_left = _left_turns(node, turns[here] + 1) > left
                turns[here] = np.where(is_left, left, turns[here] - left)
                nodes += [(node.left, here[is_left]), (node.right, here[~is_left])]
            else:
                sources[here] = node
        return sources, turns

    def last_with(self, source: int, turns: int) -> int:
        """Return the last position up to which ``source`` has had at most so many turns."""
        return self._first(lambda position: self.counts(position)[source] > turns) - 1

    def first_with(self, source: int, turns: int) -> int:
        """Return the least position up to which ``source`` has had so many turns."""
        return self._first(lambda position: self.counts(position)[source] >= turns)

    @staticmethod
    def _first(is_reached: Callable[[int], bool]) -> int:
        end = 1
        while not is_reached(end):
            end *= 2
        return bisect_left(range(end), True, key=is_reached)


def _left_turns(fork: _Fork, turns: _Turns) -> _Turns:
    """Return ``turns * share``, rounded, in two parts because 62 bits hold no more."""
    high, low = turns >> _SHARE_BITS, turns & _MASK
    return high * fork.left_share + ((low * fork.left_share + _HALF) >> _SHARE_BITS)


class MixedOrder:
    """The turns of a mix: of which source each is, and which of its batches.

    A source's turn number t is batch ``t % source_batches`` of its epoch ``t // source_batches``.

    Args:
        weights: one of each source.
        source_batches: of an epoch of each source, all at least 1.
        stop: the end of an epoch, as of `Mix`.

    Attributes:
        weights, source_batches: as given.
        epoch_turns: of an epoch of the mix.
    """

    def __init__(self, weights: Sequence[float], source_batches: Sequence[int], stop: str | int) -> None:
        self.weights, self.source_batches = list(map(float, weights)), list(source_batches)
        self._blend = Blend(self.weights)
        self.epoch_turns = self._turns_until(stop)

    def _turns_until(self, stop: str | int) -> int:
        if isinstance(stop, int):
            return stop
        due = [(i, batches) for i, batches in enumerate(self.source_batches) if self.weights[i]]
        if stop == "first_exhausted":
            return min(self._blend.last_with(*source) for source in due)
        return max(self._blend.first_with(*source) for source in due)

    def given(self, positions: range, served: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the source of each turn that has a batch, and how many turns are over with it.

        All turns are over with the last one of them.

        Args:
            positions: of the turns.
            served: how many batches of an epoch each source has for so many ranks. Turns of the
                others are passed over.
        """
        last: tuple[int, int] | None = None
        for first in range(0, len(positions), _WINDOW):
            sources, turns = self._blend.sources(as_array(positions[first : first + _WINDOW]))
            is_given = turns % np.array(self.source_batches)[sources] < np.array(served)[sources]
            for place in np.flatnonzero(is_given).tolist():
                if last is not None:
                    yield last
                last = int(sources[place]), first + place + 1
        if last is not None:
            yield last[0], len(positions)

    def given_count(self, epoch: int, served: Sequence[int]) -> int:
        """Return how many turns of an epoch of the mix have a batch."""
        ends = [self._blend.counts((epoch + end) * self.epoch_turns) for end in (0, 1)]
        of_sources = zip(*ends, self.source_batches, served, strict=True)
        return sum(_served(end, *of_source) - _served(begin, *of_source) for begin, end, *of_source in of_sources)

    def given_end(self, epoch: int, served: Sequence[int]) -> int:
        """Return how many turns of an epoch are over with the last one that has a batch."""
        begin, end = epoch * self.epoch_turns, (epoch + 1) * self.epoch_turns
        # One of two successive turns of a source has a batch. So among so many turns, one has.
        tail = range(max(begin, end - len(served) - 1), end)
        sources, turns = self._blend.sources(as_array(tail))
        is_given = np.flatnonzero(turns % np.array(self.source_batches)[sources] < np.array(served)[sources])
        return int(tail[is_given[-1]]) + 1 - begin if len(is_given) else 0

    def turns(self, source: int, positions: range) -> range | np.ndarray:
        """Return which turns of a source come at ``positions``.

        In a DataLoader's worker they are not successive.
        """
        if positions.step == 1:
            return range(*(self._blend.counts(position)[source] for position in (positions.start, positions.stop)))
        windows = [as_array(positions[first : first + _WINDOW]) for first in range(0, len(positions), _WINDOW)]
        found = [turns[sources == source] for sources, turns in map(self._blend.sources, windows)]
        return np.concatenate([np.empty(0, np.int64), *found])


def _served(turns: int, source_batches: int, served: int) -> int:
    """Return how many of a source's first turns have a batch."""
    return turns // source_batches * min(served, source_batches) + min(turns % source_batches, served)
