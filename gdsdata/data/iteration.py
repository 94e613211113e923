"""`Iteration`: reads a data set's batches ahead; counts and times iterators."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gdsdata.data.batches.reader import Reader
from gdsdata.data.counts import ADDED, nothing, sum_of, sum_of_routes
from gdsdata.data.ranks import Ranks
from gdsdata.data.samples import Samples
from gdsdata.errors import EngineClosed, GdsdataError, RankLost, StallError
from gdsdata.io import engine
from gdsdata.io.program_end import Ending, end_at_exit, leave_if_daemon
from gdsdata.observe import counted
from gdsdata.observe.times import Reporter, StepTimes, is_profiling, marked

if TYPE_CHECKING:
    from gdsdata.observe.report import NetworkUse, Report

# Samples planned at a time during an epoch: numpy's cost per call is spread over many batches.
_PLAN_SAMPLES = 4096
# Routes of bytes that storage did not read.
_FROM_MEMORY = ("page_cache", "pinned_page_cache")
# Counts that rise: of an engine, in the order of `report.WorkerTimes`, and of this process's
# requests to servers, in the order of `report.NetworkUse`.
_OF_WORKERS = ("worker_active_s", "worker_storage_s", "worker_link_s", "worker_device_s", "requests", "storage_bytes")
_OF_NETWORK = ("requests", "retries", "throttled", "hedges", "bytes")


class Iteration:
    """The iterators of a data set, and the sum of what they did.

    Args:
        samples: that are read.
        ranks: watched during an epoch.
        report_every_s: as of `GDSDataset`.

    Attributes:
        reporter: prints reports.
    """

    def __init__(self, samples: Samples, ranks: Ranks, report_every_s: float | None) -> None:
        self._samples, self._ranks = samples, ranks
        self._prefetch, self._batch_size = samples.settings.prefetch, samples.settings.batch_size
        # Counts of iterators that have ended, and the newest one's reader (None: it has ended).
        # They are replaced together, so another thread sees each batch counted once.
        self._counted: tuple[dict[str, Any], Reader[Any] | None] = (nothing(), None)
        self._piece_bytes, self._piece_memory_bytes = dict.fromkeys(engine.ROUTES, 0), 0  # of iterators that have ended
        self._times, self.reporter = StepTimes(), Reporter(report_every_s)
        # Both are of iterators that have ended.
        self._workers, self._network = (0,) * len(_OF_WORKERS), (0,) * len(_OF_NETWORK)
        # The engine, and its statistics when the newest iterator began.
        self._workers_before: tuple[engine.Engine, Mapping[str, Any]] | None = None
        self._network_before: Mapping[str, int] | None = None  # None: no iterator reads objects now
        self._pieces_s = 0.0  # of iterators that have ended
        self._place = (0, 0, 0)  # the newest iterator's epoch and batches, and how many came before it
        counted.data_sets.add(self)

    @property
    def running(self) -> Reader[Any] | None:
        """The newest iterator's reader; None: it has ended."""
        return self._counted[1]

    def begin(
        self,
        epoch: int,
        numbers: range | np.ndarray,
        handed_out: Callable[[int], object],
        transform: Callable[[Any], Any] | None,
        owner: object,
    ) -> Iterator[Any]:
        """Begin to read batches of an epoch, and return their iterator.

        Args:
            epoch: chooses the order.
            numbers: of the batches, ascending.
            handed_out: called before each batch with how many there are with it.
            transform: called on each batch.
            owner: of the iterator. It is kept until the interpreter has ended.
        """
        leave_if_daemon()
        if self not in counted.data_sets:  # it was made in another process
            self._counted = self._counted[0], None
            counted.data_sets.add(self, self.counters())
        batches = self._read_ahead(epoch, numbers, handed_out, transform, owner)
        end_at_exit(batches, next(batches))
        return batches

    def _read_ahead(
        self,
        epoch: int,
        numbers: range | np.ndarray,
        handed_out: Callable[[int], object],
        transform: Callable[[Any], Any] | None,
        owner: object,
    ) -> Generator[Any, None, None]:
        """Yield what ends it, once reading has begun, and then the batches."""
        order, source, check_ranks = self._samples.order, self._samples.source, self._ranks.watch(self._samples.share)
        done, total = 0, len(numbers)
        self._samples.check_memory(total)
        self._network, self._network_before = self._requests(), self._requests_so_far()
        reader = self._samples.reader(epoch, owner)
        self._counted = self._counted[0], reader
        self._place = epoch, total, self._times.batches
        ending = Ending(partial(self._end, reader))
        take, reach, times, prefetch = reader.next, reader.reach, self._times, self._prefetch
        planned, plan_batches, ahead = 0, max(prefetch, reader.least_planned), prefetch * reader.batches_in_slot
        most = max(prefetch, _PLAN_SAMPLES // self._batch_size, 2 * reader.batches_in_slot)
        due = 0  # the batch before which `plan` is called next
        prints = self.reporter if self.reporter.is_on else None

        def plan() -> None:
            """Plan ahead. The first plan is short, because the first batch waits for it alone."""
            nonlocal planned, plan_batches, due
            if reach is not None:
                reach(int(numbers[done]))
            if planned - done <= plan_batches // 2 + ahead:
                count = min(plan_batches, total - planned)
                least = min(count, max(0, done + reader.least_planned - planned))
                count = max(reader.steps_local(numbers[planned : planned + count]), least)
                if count:
                    reader.plan_in_order(order, epoch, numbers[planned : planned + count])
                    planned += count
                    plan_batches = min(2 * plan_batches, most)
            if reach is None:  # else each step may have chunks fetched
                due = planned - plan_batches // 2 - ahead if planned < total else total

        try:
            if total:
                plan()
            yield ending
            times.asked()
            if reader.pieces is not None:  # waits before this are not the loop's
                self._pieces_s -= reader.pieces.waited_s
            while done < total:
                leave_if_daemon()
                check_ranks()
                if done >= due:  # the second plan is made while the first batch is read
                    plan()
                if is_profiling():
                    with marked("gdsdata: waiting for a batch"):
                        batch = take()
                else:
                    batch = take()
                if transform is not None:
                    batch = times.transformed(transform, batch)
                done += 1
                times.handed_out()
                handed_out(done)
                if self._workers_before is None:  # now: what they waited before the first batch does not count
                    shared = source.engine
                    self._workers_before = shared, shared.statistics()
                if prints is not None:
                    prints.handed_out(self.report)
                if done == total:  # the consumer may not ask again: close everything before this batch is yielded
                    break
                yield batch
                times.trained()
                batch = None  # a batch that the consumer has dropped must not live on here
        except GeneratorExit:  # asked first: when Python has cleared this module, the names below are None
            raise
        except (GdsdataError, FileNotFoundError) as error:
            leave_if_daemon()
            if isinstance(error, StallError):
                error.statistics = self.stats(epoch)
            if not isinstance(error, RankLost):
                self._samples.forget_index()  # the files are not as they were
            raise
        except RuntimeError:  # of an executor that the program's end has shut down
            leave_if_daemon()
            raise
        finally:
            ending()
        if total:
            yield batch
            times.trained()

    def _end(self, reader: Reader[Any]) -> None:
        """Close a reader, and keep its counts."""
        totals, running = self._counted
        self._counted = sum_of(totals, reader.statistics()), None if running is reader else running
        reader.close()
        self._workers, self._workers_before = self._worker_times(), None
        self._network, self._network_before = self._requests(), None
        if (pieces := reader.pieces) is not None:
            self._piece_bytes = sum_of_routes(self._piece_bytes, pieces.bytes)
            self._piece_memory_bytes = max(self._piece_memory_bytes, pieces.memory_bytes)
            self._pieces_s += pieces.waited_s
        self._samples.source.warn_of_fallbacks()
        self._samples.forget_changed()

    def report(self) -> Report:
        """Return `GDSDataset.report`."""
        from gdsdata.observe.report import WorkerTimes, diagnose  # few programs ask for one

        counts = self._counts()
        workers, name = WorkerTimes(*self._worker_times()), self._samples.shuffle_name
        times, network = self._times, self._network_use(counts["bytes"])
        ring_full_s, stall_s = counts["ring_full_s"], counts["stall_s"]
        on_gpu = self._samples.settings.device.type == "cuda"
        return diagnose(times, workers, counts["bytes"], ring_full_s, stall_s, name, network, on_gpu)

    def stats(self, epoch: int) -> dict[str, Any]:
        """Return `GDSDataset.stats`, if ``epoch`` is read or is the next to be read."""
        samples, result = self._samples, self._counts()
        # First, because it indexes the files again if they have changed.
        result["ring_bytes"] = samples.ring_bytes(epoch, self.running)
        result |= samples.source.stats()
        result["piece_bytes"], result["piece_memory_bytes"] = dict(self._piece_bytes), self._piece_memory_bytes
        result["shuffle"] = f"{samples.shuffle_name}: {samples.shuffle_reason}"
        if (skipped := samples.settings.skipped) is not None:
            result["skipped"] = skipped.report()
        return result

    def _counts(self) -> dict[str, Any]:
        totals, running = self._counted
        return sum_of(totals, running.statistics()) if running is not None else dict(totals)

    def counters(self) -> counted.Counters:
        """Return what `gdsdata.top` shows as rates. Any thread may call it; it changes nothing."""
        counts, times = self._counts(), self._times
        return {
            **{name: counts[name] for name in ("bytes", *ADDED)},
            "ready_sum": counts["mean_ready"] * counts["batches"],
            **{name: getattr(times, name) for name in ("input_s", "transform_s", "training_s", "checkpoint_s")},
        }

    def gauges(self) -> dict[str, Any]:
        """Return what `gdsdata.top` shows of this moment. Any thread may call it."""
        paths, running = self._samples.paths, self.running
        epoch, steps, before = self._place
        at = {} if running is None else running.statistics()
        return {
            "source": paths[0].partition("?")[0],  # behind it, a signed URL has its secrets
            "files": len(paths),
            "epoch": epoch,
            "epoch_batches": steps,
            "epoch_batch": self._times.batches - before,
            "ring": {"slots": self._prefetch, "ready": at.get("ready", 0), "filling": at.get("filling", 0)},
        }

    def _worker_times(self) -> tuple[Any, ...]:
        if self._workers_before is None:
            return self._workers
        shared, before = self._workers_before
        return _added(self._workers, _OF_WORKERS, shared.statistics(), before)

    def _requests(self) -> tuple[int, ...]:
        """Return the requests of this process, while an iterator read objects."""
        if self._network_before is None:
            return self._network
        try:
            now = engine.http_statistics()
        except EngineClosed:  # the program ends, and its client has
            return self._network
        return _added(self._network, _OF_NETWORK, now, self._network_before)

    def _requests_so_far(self) -> Mapping[str, int] | None:
        """Return the requests of this process so far; None if no object is read."""
        return engine.http_statistics() if self._samples.source.reads_objects else None

    def _network_use(self, batch_bytes: Mapping[str, int]) -> NetworkUse | None:
        """Return what came from servers; None if no object is read."""
        if not self._samples.source.reads_objects:
            return None
        from gdsdata.observe.report import NetworkUse

        of_pieces, pieces_s = self._piece_bytes, self._pieces_s
        if (running := self.running) is not None and (pieces := running.pieces) is not None:
            of_pieces, pieces_s = sum_of_routes(of_pieces, pieces.bytes), pieces_s + pieces.waited_s
        read = sum_of_routes(batch_bytes, of_pieces)
        requests = NetworkUse(*self._requests())
        # Blocks for the cache are fetched whole for a part of them. The rest counts as local_cache.
        remote = requests.bytes if read["cache_fill"] else read["remote"]
        stored = sum(count for route, count in read.items() if route not in _FROM_MEMORY)
        return requests._replace(bytes=remote, other_bytes=max(0, stored - remote), pieces_s=pieces_s)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, which have their own readers."""
        return {**self.__dict__, "_counted": (self._counted[0], None), "_workers_before": None, "_network_before": None}


def _added(
    totals: tuple[Any, ...], names: Iterable[str], now: Mapping[str, Any], before: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return ``totals`` and what came to these counts since ``before``.

    It is 0 of counts that a new client has begun anew.
    """
    return tuple(total + max(0, now[name] - before[name]) for total, name in zip(totals, names, strict=True))
