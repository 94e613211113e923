"""Workloads that read data sets: of files, of objects, in workers and in forked children."""

import contextlib
import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.errors import CorruptData, IoError
from long_runs.made_data import KINDS, Made, check_epoch, make
from long_runs.world import Workload, World

SHUFFLES = (False, True, "lanes", "auto")
# Faults that are recovered from.
UNSEEN = "shorten=0.3,interrupt=0.2,late=0.1,late_ms=3,reorder=0.2"
OPTIONS = (
    EngineOptions(),
    EngineOptions(backend="posix", workers=2),
    EngineOptions(direct="always", workers=1),
    EngineOptions(direct="never", workers=2),
)
# The server recovers from these (tests/test_remote_faults.py).
PASSING = (
    *("reset_before", "reset_after", "close_before", "reset_within", "short", "short_length", "wrong_range"),
    *("chunked", "garbage_headers", "status_429", "status_500", "status_503", "slow", "stall"),
)
LASTING = ("status_403", "status_404", "other_version", "whole")
CACHE_BYTES = 6 * 2**20


class Reader(Workload):
    """Makes data sets of known data, and checks their batches."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.newest: GDSDataset | None = None

    def data_set(self, made: Made, source: Any, options: EngineOptions | None = None, **arguments: Any) -> GDSDataset:
        reading = Reading(options=options, prefetch=self.random.choice((1, 2, 4)))
        chosen = {
            "batch_size": self.random.choice((4, 7, 16)),
            "shuffle": self.random.choice(SHUFFLES),
            "seed": self.random.randrange(1000),
            "device": self.world.device,
            "on_break": "restart",
            "reading": reading,
        }
        chosen |= arguments
        self.order = {name: chosen[name] for name in ("batch_size", "shuffle", "seed")}
        self.newest = GDSDataset(source, **made.arguments, **chosen)
        return self.newest

    def checked(self, made: Made, batches: Iterator[Any]) -> list[int]:
        """Check batches, and return the numbers of their samples."""
        numbers: list[int] = []
        for batch in batches:
            numbers += made.numbers(batch)
            self.counts.add(batches=1)
        return numbers

    def epoch(self, made: Made, batches: Iterator[Any]) -> None:
        check_epoch(made, self.checked(made, batches))
        self.counts.add(epochs=1)

    def statistics(self) -> dict[str, Any]:
        with contextlib.suppress(Exception):  # it may index files that are gone
            return self.newest.stats() if self.newest is not None else {}
        return {}


class LocalEpochs(Reader):
    """Whole epochs, resumed ones, and data sets that are dropped within one."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.made = {kind: make(kind, place, 1) for place, kind in enumerate(KINDS)}
        for kind, made in self.made.items():
            made.write(world.subfolder("data", kind))
        self.held: list[Any] = []  # iterators in the middle of an epoch, and batches

    def turn(self) -> None:
        kind = self.random.choice(list(self.made))
        made = self.made[kind]
        options = self.random.choice(OPTIONS)
        if self.random.random() < 0.3:
            options = EngineOptions(direct="always", faults=f"seed={self.random.randrange(99)},{UNSEEN}")
            self.counts.add(faulty_epochs=1)
        source = self.world.folder / "data" / kind
        dataset = self.data_set(made, source, options)
        self.random.choice((self.whole, self.resumed, self.dropped))(made, dataset, source)

    def whole(self, made: Made, dataset: GDSDataset, source: Any) -> None:
        self.epoch(made, dataset)

    def resumed(self, made: Made, dataset: GDSDataset, source: Any) -> None:
        order = self.order
        batches, numbers = iter(dataset), []
        for _ in range(self.random.randrange(len(dataset))):
            numbers += made.numbers(next(batches))
        state = dataset.state_dict()
        del batches
        try:
            self.data_set(made, source).load_state_dict(state)
        except ValueError:  # it is of another order
            self.counts.add(refused_states=1)
        exact = self.data_set(made, source, **order)
        exact.load_state_dict(state)
        check_epoch(made, numbers + self.checked(made, exact))
        self.counts.add(epochs=1, resumed=1)

    def dropped(self, made: Made, dataset: GDSDataset, source: Any) -> None:
        batches = iter(dataset)
        first = next(batches)
        self.held.append((made, batches, first))
        self.counts.add(dropped=1)
        if len(self.held) > 3:
            made, batches, first = self.held.pop(self.random.randrange(3))
            made.numbers(first)  # it is still what it was
            if self.random.random() < 0.5:
                self.checked(made, batches)

    def close(self) -> None:
        self.held.clear()


class FailingReads(Reader):
    """Storage that fails: right batches up to the error, or without the samples that fail."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.made = {kind: make(kind, place, 2) for place, kind in enumerate(KINDS)}
        for kind, made in self.made.items():
            made.write(world.subfolder("data", f"failing-{kind}"))

    def turn(self) -> None:
        kind = self.random.choice(list(self.made))
        made, source = self.made[kind], self.world.folder / "data" / f"failing-{kind}"
        faults = f"seed={self.random.randrange(99)},fail={self.random.choice((0.01, 0.05, 0.2))}"
        options = EngineOptions(direct="always", faults=faults)
        on_error = self.random.choice(("raise", "skip"))
        dataset = self.data_set(made, source, options, on_error=on_error)
        try:
            numbers = self.checked(made, dataset)
        except (IoError, CorruptData):
            self.counts.add(faults_seen=1)
            return
        assert len(set(numbers)) == len(numbers), "a sample came twice"
        if len(numbers) < made.samples:
            skipped = dataset.stats()["skipped"]["samples"]
            assert on_error == "skip" and skipped == made.samples - len(numbers), (skipped, len(numbers))
            self.counts.add(faults_seen=1)


class ReplacedFiles(Reader):
    """Files that are replaced within an epoch, and indexed anew."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.generation = dict.fromkeys(KINDS, 0)

    def turn(self) -> None:
        place = self.random.randrange(len(KINDS))
        kind = list(KINDS)[place]
        source = self.world.subfolder("data", f"replaced-{kind}")
        old = make(kind, place, 3, self.generation[kind])
        old.write(source)
        batches = iter(self.data_set(old, source))
        old.numbers(next(batches))
        self.generation[kind] += 1
        new = make(kind, place, 3, self.generation[kind])
        how = self.random.choice((new.write, self.truncate, self.remove))
        how(source)
        try:
            self.checked(old, batches)
        except (CorruptData, FileNotFoundError):
            self.counts.add(faults_seen=1)
        del batches
        new.write(source)
        self.epoch(new, self.data_set(new, source))
        self.counts.add(replaced=1)

    def some_file(self, source: Any) -> Any:
        return self.random.choice([path for path in source.iterdir() if not path.name.startswith(".")])

    def truncate(self, source: Any) -> None:
        path = self.some_file(source)
        os.truncate(path, os.path.getsize(path) // 2)

    def remove(self, source: Any) -> None:
        self.some_file(source).unlink()


class RemoteEpochs(Reader):
    """Objects of a store that fails, a cache that is too small, and objects that are replaced."""

    PREFIXES = 6

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.made: dict[int, tuple[int, Made]] = {}
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1
        place = self.random.randrange(self.PREFIXES)
        if place not in self.made or self.random.random() < 0.1:
            self.replace(place)
        made = self.made[place][1]
        if self.random.random() < 0.1:
            return self.refused(place, made)
        self.plan(share=self.random.choice((0.0, 0.02, 0.1)), kinds=PASSING)
        dataset = self.remote(place, made)
        if self.random.random() < 0.2:
            made.numbers(next(iter(dataset)))
            self.counts.add(dropped=1)
        else:
            self.epoch(made, dataset)
            self.counts.add(remote_epochs=1)

    def plan(self, **plan: Any) -> None:
        self.world.client.set_plan(seed=self.random.randrange(10**6), stall_s=0.3, slow_bytes_per_s=4e6, **plan)

    def prefix(self, place: int) -> str:
        return f"data/{place}/"

    def remote(self, place: int, made: Made, **arguments: Any) -> GDSDataset:
        cache = {"cache": self.world.folder / "cache", "cache_bytes": CACHE_BYTES}
        return self.data_set(made, self.world.client.url(self.prefix(place)), **cache, **arguments)

    def replace(self, place: int) -> None:
        """Put new objects; a data set of the old ones must not give bytes of both."""
        kind = list(KINDS)[place % len(KINDS)]
        generation, old = self.made.get(place, (0, None))
        batches = None
        if old is not None:
            batches = iter(self.remote(place, old))
            old.numbers(next(batches))
        made = make(kind, place, 4, generation + 1)
        self.made[place] = generation + 1, made
        for name, content in made.files.items():
            self.world.client.put(self.prefix(place) + name, content)
        self.counts.add(replaced=1)
        if batches is not None:
            try:
                self.checked(old, batches)
            except (CorruptData, FileNotFoundError):
                self.counts.add(faults_seen=1)

    def refused(self, place: int, made: Made) -> None:
        """Read from a server that refuses for good."""
        self.plan(share=0.3, kinds=LASTING, keys=self.prefix(place), in_a_row=None)
        try:
            self.checked(made, self.remote(place, made))
        except (IoError, CorruptData, FileNotFoundError):
            self.counts.add(faults_seen=1)
        self.plan()


class LoaderEpochs(Reader):
    """A DataLoader's workers, whole epochs and broken-off ones. On the main thread, as it forks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.made = {kind: make(kind, place, 5) for place, kind in enumerate(KINDS)}
        for kind, made in self.made.items():
            made.write(world.subfolder("data", f"loader-{kind}"))

    def turn(self) -> None:
        kind = self.random.choice(list(self.made))
        made = self.made[kind]
        source = self.world.folder / "data" / f"loader-{kind}"
        dataset = self.data_set(made, source, device="cpu")
        loader = DataLoader(dataset, batch_size=None, num_workers=self.random.choice((1, 2)))
        if self.random.random() < 0.3:
            batches = iter(loader)
            made.numbers(next(batches))
            del batches
            self.counts.add(dropped=1)
        else:
            self.epoch(made, loader)
            self.counts.add(worker_epochs=1)


class ForkedReads(LoaderEpochs):
    """Forked children that read, while the parent's threads work. On the main thread."""

    def turn(self) -> None:
        kind = self.random.choice(list(self.made))
        made = self.made[kind]
        dataset = self.data_set(made, self.world.folder / "data" / f"loader-{kind}", device="cpu")
        batches = iter(dataset)
        made.numbers(next(batches))  # the engine is at work when the process forks
        child = os.fork()
        if child == 0:
            self.in_child(made, dataset)
        self.checked(made, batches)
        code = code_of(child, self.world.child_s)
        assert code == 0, f"a forked child ended with {code}"
        self.counts.add(forks=1)

    def in_child(self, made: Made, dataset: GDSDataset) -> None:
        code = 1
        try:
            faulthandler.register(signal.SIGUSR1)
            check_epoch(made, self.checked(made, dataset))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def code_of(child: int, most_s: float) -> int:
    """Wait for a child, and return its exit code. One that hangs shows its stacks and is killed."""
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGUSR1)
    time.sleep(2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"a forked child still ran after {most_s:g} s; its stacks are on stderr")
