"""`Mix`: batches of several data sets, in proportions that hold at every moment."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gdsdata.data.dataset import GDSDataset
from gdsdata.data.epoch_dataset import EpochDataset
from gdsdata.data.loaders import refuse_second_share
from gdsdata.data.order.blend import MixedOrder
from gdsdata.data.progress import Begun, Progress, checked_epoch, position_in
from gdsdata.data.ranks import EpochRanks, Ranks, Share
from gdsdata.whole_numbers import shown, whole_number

_STOPS = ("first_exhausted", "all_exhausted")
_LARGEST_POSITION = 2**61


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
        self._epoch_ranks = EpochRanks()
        self._own_order: MixedOrder | None = None
        self._order_of_state: MixedOrder | None = None
        self._step_of_state: list[int] | None = None
        self._take_up(_share_found(self.sources, Ranks.found_or_none) or Share(0, 1))

    def _take_up(self, share: Share) -> None:
        """Have the sources read this share, in the order of what they have then.

        A state that was loaded has an order of its own, which stays the same. But a share whose
        steps have other numbers of samples does not fit it.
        """
        self._share = share
        self._served = [source.take_up(share) for source in self.sources]
        if self._own_order is None or self._own_order.source_batches != self._served:
            self._own_order = self._order_of(self._served)
        self._order = self._own_order
        if self._order_of_state is not None and self._step_of_state == self._step_samples():
            self._order = self._order_of_state

    def _order_of(self, source_batches: Sequence[int]) -> MixedOrder:
        return MixedOrder(self._weights_asked or source_batches, source_batches, self.stop)

    @property
    def weights(self) -> list[float]:
        """The weights of the sources, as given or by their numbers of batches."""
        return self._order.weights

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch.

        It is the same for every rank, and for every epoch of so many ranks. After a state of fewer
        ranks was loaded, an epoch has fewer batches if it passes over some: see `load_state_dict`.

        Raises:
            RuntimeError: as of a `GDSDataset`.
        """
        self._take_up_epoch()
        return self._order.given_count(self._progress.epoch, self._served)

    def _epoch_turns(self) -> int:
        self._take_up_epoch()
        return self._order.epoch_turns

    def _take_up_epoch(self) -> None:
        self._take_up(self._epoch_ranks.fix(self._progress.epoch, _share_found(self.sources)))

    @property
    def _largest_epoch(self) -> int:
        return _LARGEST_POSITION // self._order.epoch_turns

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
            **self._identity(self._order),
            "sources": [source.state_dict() for source in self.sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iterator continue with the batch after those ``state`` counts.

        As with `GDSDataset.load_state_dict`, rank, batch sizes and world size may differ if their
        products do not. The order of the sources is that of the state, also in later epochs. With
        more ranks, the last step of a source's epoch may have fewer samples than there are ranks.
        ``uneven="drop"`` leaves them out. Then the turn of this step is passed over.

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
        position = position_in(state)
        before = self._share, self._order_of_state
        of_state = self.sources[0].ranks.of_state(state["sources"][0], self.sources[0].batch_size)
        try:
            self._order_of_state = None
            self._take_up(_share_found(self.sources, Ranks.found_or_none) or of_state)
            self._order_of_state = self._order = self._order_in(state)
            position_in(state, self._largest_epoch)
            self._load_sources(state)
        except ValueError:
            share, self._order_of_state = before
            self._take_up(share)
            raise
        self._epoch_ranks.release()
        self._step_of_state = self._step_samples()
        self._progress.load(state, self._order.given_end(position.epoch, self._served), self._step_of_state)

    def _order_in(self, state: dict[str, Any]) -> MixedOrder:
        """Return the order of a state, which other numbers of ranks may have made."""
        order, said = self._order, state.get("source_batches")
        if isinstance(said, list) and len(said) == len(self.sources):
            lengths = [source.epoch_lengths for source in self.sources]
            if all(type(batches) is int and batches in of for batches, of in zip(said, lengths, strict=True)):
                order = self._order_of(said)
        for key, now in self._identity(order).items():
            if state.get(key) != now:
                remedy = "" if key == "source_batches" else f". Make the Mix with {key}={state.get(key)!r} to resume it"
                raise ValueError(f"the state is of another mix: {key} was {state.get(key)!r} and is {now!r}{remedy}")
        return order

    def _load_sources(self, state: dict[str, Any]) -> None:
        for i, (source, of_source) in enumerate(zip(self.sources, state["sources"], strict=True)):
            try:
                source.load_state_dict(of_source)
            except ValueError as error:
                raise ValueError(f"source {i}: {error}") from error

    def _step_samples(self) -> list[int]:
        return [source.batch_size * self._share.world_size for source in self.sources]

    def _identity(self, order: MixedOrder) -> dict[str, Any]:
        """Return what, besides the sources, gives the same positions the same batches."""
        return {"weights": list(order.weights), "stop": self.stop, "source_batches": list(order.source_batches)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sources}, weights={self.weights}, stop={self.stop!r})"

    def _batches_of(self, begun: Begun) -> Iterator[Any]:
        for source in self.sources:
            source.agree_on_shuffle()
        begin, numbers = begun.epoch * self._order.epoch_turns, begun.numbers
        return self._epoch_from(begun, range(begin + numbers.start, begin + numbers.stop, numbers.step))

    def _epoch_from(self, begun: Begun, positions: range) -> Iterator[Any]:
        batch: Any = None
        done = 0
        streams = [self._stream(source, positions, begun.epoch) for source in range(len(self.sources))]
        try:
            for source, done in self._order.given(positions, self._served):
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
        if done:
            yield batch
        elif positions:  # all of them are passed over
            self._progress.handed_out(begun, len(positions))
        self._progress.exhausted(begun)

    def _stream(self, source: int, positions: range, mix_epoch: int) -> Generator[Any, None, None]:
        """Yield the batches of a source at those of ``positions`` that are its turn."""
        turns, batches = self._order.turns(source, positions), self._order.source_batches[source]
        served = min(self._served[source], batches)
        while len(turns):
            epoch = int(turns[0]) // batches
            first = epoch * batches
            here, after = bisect_left(turns, first + served), bisect_left(turns, first + batches)
            self._epoch_ranks.fix(mix_epoch, _share_found(self.sources))  # raises if they have changed
            if here:
                yield from self.sources[source].batches(epoch, _minus(turns[:here], first))
            turns = turns[after:]

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
    if not isinstance(sources, Iterable) or isinstance(sources, (str, Mapping, EpochDataset)):
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
