"""`Mix`: batches of several data sets, in proportions that hold at every moment."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gdsdata.data.dataset import GDSDataset
from gdsdata.data.epoch_dataset import EpochDataset
from gdsdata.data.loaders import refuse_second_share
from gdsdata.data.order.permutation import as_array
from gdsdata.data.progress import Begun, Progress, checked_epoch, position_in
from gdsdata.data.ranks import EpochRanks, Ranks, Share
from gdsdata.whole_numbers import shown, whole_number

# Positions whose sources are computed together.
_WINDOW = 4096
# A share is a multiple of 2 ** -31, so that all arithmetic is exact in int64 and alike on every
# machine.
_SHARE_BITS = 31
_HALF = 1 << (_SHARE_BITS - 1)
_MASK = (1 << _SHARE_BITS) - 1
_STOPS = ("first_exhausted", "all_exhausted")
_LARGEST_POSITION = 2**61

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


class Mix(EpochDataset):
    """Batches of several data sets, in proportions that hold at every moment.

    After n batches, source i has given ``n * weights[i] / sum(weights)`` of them, give or take less
    than 2 (less than 1 for up to three sources): nothing is drawn at random, so nothing drifts. The
    source of a batch depends on the weights and the position alone, so all ranks get batches of the
    same source at the same step, with equally many samples.

    A batch comes from one source, as it is: with its fields, shapes, batch size and `transform`,
    which may all differ. Weights are of batches; if batch sizes differ, the proportion of
    samples is that of ``weight * batch_size``. For several sources in one step of the optimizer,
    use small batches and accumulate their gradients.

    Sources never start anew in the middle. Each is one endless stream: its epoch 0, then its epoch
    1 in that epoch's order, and so on. An epoch of the mix is a stretch of it. So all samples of a
    source have come before any comes again, however short the epochs of the mix are.

    Use it as a `GDSDataset`: in a loop, in ``DataLoader(mix, batch_size=None)``, or in torchdata's
    StatefulDataLoader. The sources' own places, and so their states, are left alone.

    Args:
        sources: data sets, of the same rank and world size. Equal seeds are fine.
        weights: one of each source; 0 leaves it out. None: by their numbers of batches.
        stop: the end of an epoch. ``"first_exhausted"``: when a source's turn comes that has given
            all of its own epoch. ``"all_exhausted"``: when each source has given all of it; the
            others have started over by then. A number: after so many batches. Later epochs are as
            long as the first one; in them, such a source may come to its end a batch earlier or
            later.
        on_break: as of `GDSDataset`.

    Raises:
        TypeError: ``sources`` or ``weights`` is no list, or a weight is no number.
        ValueError: no sources, one of another kind, rank or world size, weights of another number,
            negative, not finite or all 0, or another ``stop`` or ``on_break``.
    """

    def __init__(
        self,
        sources: Iterable[GDSDataset],
        weights: Iterable[float] | None = None,
        stop: str | int = "first_exhausted",
        on_break: str | None = None,
    ) -> None:
        super().__init__()
        self.sources = sources = _checked_sources(sources)
        self._weights_asked = None if weights is None else _checked_weights(weights, len(sources))
        self.stop = _checked_stop(stop)
        self._progress = Progress(on_break)
        self._given: Counter[int] = Counter()
        self._epoch_ranks, self._source_batches = EpochRanks(), [0] * len(sources)
        self._take_up(_share_found(self.sources, Ranks.found_or_none) or Share(0, 1))

    def _take_up(self, share: Share) -> None:
        """Have the sources read this share, and work out the epoch of what they have then."""
        self._share = share
        source_batches = [source.take_up(share) for source in self.sources]
        if source_batches != self._source_batches:
            weights = source_batches if self._weights_asked is None else self._weights_asked
            self._source_batches, self.weights = source_batches, list(map(float, weights))
            self._blend = Blend(self.weights)
            self._batches = self._epoch_batches()

    def _epoch_batches(self) -> int:
        if isinstance(self.stop, int):
            return self.stop
        due = [(i, batches) for i, batches in enumerate(self._source_batches) if self.weights[i]]
        if self.stop == "first_exhausted":
            return min(self._blend.last_with(*source) for source in due)
        return max(self._blend.first_with(*source) for source in due)

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch.

        It is the same for every rank, and for every epoch of so many ranks.

        Raises:
            RuntimeError: as of a `GDSDataset`.
        """
        self._take_up(self._epoch_ranks.fix(self._progress.epoch, _share_found(self.sources)))
        return self._batches

    @property
    def _largest_epoch(self) -> int:
        return _LARGEST_POSITION // self._batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterator, from its first batch.

        The sources' own epochs follow from it.

        The epoch of a state that was just loaded changes nothing, as with `GDSDataset.set_epoch`.

        Raises:
            ValueError: it is negative, no whole number, or beyond all counting.
            RuntimeError: as of a `GDSDataset`.
        """
        refuse_second_share(self, lambda: max(source.world_size for source in self.sources))
        self._progress.go_to(checked_epoch(epoch, self._largest_epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator is: plain numbers, and the sources' states.

        Its size does not depend on the epoch's length.

        It counts the batches that were handed out, not those read ahead, and can be taken at any
        moment.

        Raises:
            RuntimeError: as `GDSDataset.state_dict`.
        """
        epoch_share = self._epoch_ranks.of(self._progress.epoch)
        self._take_up(epoch_share or _share_found(self.sources, Ranks.found_or_none) or self._share)
        return {
            "version": 1,
            **self._progress.state(),
            **self._identity(),
            "sources": [source.state_dict() for source in self.sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iterator continue with the batch after those ``state`` counts.

        As with `GDSDataset.load_state_dict`, rank, batch sizes and world size may differ if their
        products do not.

        Raises:
            TypeError: it is no dict.
            ValueError: the state is of other sources, or the same in another order, or of other
                weights or ends, or one of its numbers cannot be.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"a state is a dict that state_dict() returned, and this is a {type(state).__name__}")
        if "sources" not in state and "samples_per_step" in state:
            raise ValueError("the state is of a single GDSDataset, and this is a Mix: pass it to that data set")
        if state.get("version") != 1 or "sources" not in state:
            raise ValueError(f"this is no state of a Mix that this version knows: {state!r}")
        if len(state["sources"]) != len(self.sources):
            raise ValueError(f"the state is of {len(state['sources'])} sources, and there are {len(self.sources)}")
        position_in(state)
        before = self._share
        of_state = self.sources[0].ranks.of_state(state["sources"][0], self.sources[0].batch_size)
        try:
            self._take_up(_share_found(self.sources, Ranks.found_or_none) or of_state)
            position_in(state, self._largest_epoch)
            self._load_sources(state)
        except ValueError:
            self._take_up(before)
            raise
        self._epoch_ranks.release()
        self._progress.load(state, self._batches, self._step_samples())

    def _load_sources(self, state: dict[str, Any]) -> None:
        for key, now in self._identity().items():
            if state.get(key) != now:
                raise ValueError(f"the state is of another mix: {key} was {state.get(key)!r} and is {now!r}")
        for i, (source, of_source) in enumerate(zip(self.sources, state["sources"], strict=True)):
            try:
                source.load_state_dict(of_source)
            except ValueError as error:
                raise ValueError(f"source {i}: {error}") from error

    def _step_samples(self) -> list[int]:
        return [source.batch_size * self._share.world_size for source in self.sources]

    def _identity(self) -> dict[str, Any]:
        """Return what, besides the sources, gives the same positions the same batches."""
        return {"weights": self.weights, "stop": self.stop, "source_batches": self._source_batches}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sources}, weights={self.weights}, stop={self.stop!r})"

    def _batches_of(self, begun: Begun) -> Iterator[Any]:
        for source in self.sources:
            source.agree_on_shuffle()
        begin, numbers = begun.epoch * self._batches, begun.numbers
        return self._epoch_from(begun, range(begin + numbers.start, begin + numbers.stop, numbers.step))

    def _epoch_from(self, begun: Begun, positions: range) -> Iterator[Any]:
        batch: Any
        streams = [self._stream(source, positions, begun.epoch) for source in range(len(self.sources))]
        try:
            for done, source in enumerate(self._sources_at(positions), 1):
                batch = next(streams[source])
                self._given[source] += 1
                self._progress.handed_out(begun, done)
                if done == len(positions):  # nobody may ask for more: close everything before this batch is yielded
                    break
                yield batch
                batch = None  # what the consumer has dropped must not live on here
        finally:
            for stream in streams:
                stream.close()
        if positions:
            yield batch
        self._progress.exhausted(begun)

    def _sources_at(self, positions: range) -> Iterator[int]:
        for first in range(0, len(positions), _WINDOW):
            yield from self._blend.sources(as_array(positions[first : first + _WINDOW]))[0].tolist()

    def _stream(self, source: int, positions: range, mix_epoch: int) -> Generator[Any, None, None]:
        """Yield the batches of a source at those of ``positions`` that are its turn."""
        turns, batches = self._turns(source, positions), self._source_batches[source]
        while len(turns):
            epoch = int(turns[0]) // batches
            here = bisect_left(turns, (epoch + 1) * batches)
            self._epoch_ranks.fix(mix_epoch, _share_found(self.sources))  # raises if they have changed
            yield from self.sources[source].batches(epoch, _minus(turns[:here], epoch * batches))
            turns = turns[here:]

    def _turns(self, source: int, positions: range) -> range | np.ndarray:
        """Return which of its turns come at ``positions``.

        In a DataLoader's worker they are not successive.
        """
        if positions.step == 1:
            return range(*(self._blend.counts(position)[source] for position in (positions.start, positions.stop)))
        windows = [as_array(positions[first : first + _WINDOW]) for first in range(0, len(positions), _WINDOW)]
        found = [turns[sources == source] for sources, turns in map(self._blend.sources, windows)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def stats(self) -> dict[str, Any]:
        """Return counts of what has happened since the sources were made.

        Returns:
            batches: handed out by this mix, of each source.
            stalls, stall_s: how often and how long the consumer waited for a source, of all
                together.
            sources: the `GDSDataset.stats` of each.
        """
        of_sources = [source.stats() for source in self.sources]
        return {
            "batches": [self._given[source] for source in range(len(self.sources))],
            **{key: sum(one[key] for one in of_sources) for key in ("stalls", "stall_s")},
            "sources": of_sources,
        }


def _minus(numbers: range | np.ndarray, less: int) -> range | np.ndarray:
    if isinstance(numbers, range):
        return range(numbers.start - less, numbers.stop - less, numbers.step)
    return numbers - less


def _checked_sources(sources: Iterable[GDSDataset]) -> list[GDSDataset]:
    if not isinstance(sources, Iterable) or isinstance(sources, (str, EpochDataset)):
        raise TypeError(f"sources={shown(sources)} must be a list of GDSDatasets, as in Mix([one, two])")
    found = list(sources)
    if not found:
        raise ValueError("Mix: there are no sources")
    for i, source in enumerate(found):
        if not isinstance(source, GDSDataset):
            raise ValueError(f"Mix: source {i} is a {type(source).__name__}, and they are GDSDatasets")
    return found


def _checked_weights(weights: Iterable[float], sources: int) -> list[float]:
    if not isinstance(weights, Iterable) or isinstance(weights, (str, bytes, Mapping)):
        raise TypeError(f"weights={shown(weights)} must be a list of numbers, one for each source")
    found = [_as_float(i, weight) for i, weight in enumerate(weights)]
    if len(found) != sources:
        raise ValueError(f"{len(found)} weights for {sources} sources: give one each")
    return found


def _as_float(place: int, weight: Any) -> float:
    try:
        if not isinstance(weight, (str, bytes)):
            return float(weight)
    except OverflowError:  # an int beyond all floats, which `Blend` refuses
        return math.inf
    except (TypeError, ValueError):
        pass
    raise TypeError(f"weights[{place}]={shown(weight)} must be a number")


def _checked_stop(stop: str | int) -> str | int:
    if stop in _STOPS:
        return stop
    try:
        batches = whole_number("stop", stop)
    except TypeError:
        batches = 0
    if not 1 <= batches <= _LARGEST_POSITION:
        raise ValueError(
            f"stop={shown(stop)}: it is {' or '.join(map(repr, _STOPS))} or a number of batches, 1 to 2**61"
        )
    return batches


def _share_found(
    sources: Sequence[GDSDataset], found_by: Callable[[Ranks], Share | None] = Ranks.found
) -> Share | None:
    """Return the share that is known of any source, which the others must have too.

    None: nothing says that there are several processes.
    """
    found = [found_by(source.ranks) for source in sources]
    shares = [share or Share(0, 1) for share in found]
    for i, share in enumerate(shares):
        if share != shares[0]:
            raise ValueError(
                f"Mix: source {i} is of rank {share.rank} of {share.world_size}, and source 0 of rank "
                f"{shares[0].rank} of {shares[0].world_size}: their batches would not be of the same steps"
            )
    return next(filter(None, found), None)
