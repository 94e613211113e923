"""The base classes of rows, by the work of their cases; also of your own rows."""

import collections
import contextlib
import functools
import importlib
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from gdsdata.bench.data.made import sync
from gdsdata.bench.measure import device
from gdsdata.bench.peers.registry import REGISTERED, derived


class Peer:
    """One way to do a case's work. Empty `kinds` and `caches` mean all of the case's.

    A class names the cases that it `serves` in its head, with a space between two of them.
    """

    key = ""  # its name in case.rows
    name = ""
    setting = ""  # one sentence for the report
    package = ""  # what has to be installed
    path = ""  # how its bytes come, if it does not count them: mmap, read, write, ...
    kinds: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    device: str

    def __init_subclass__(cls, serves="", **more):
        super().__init_subclass__(**more)
        for case in serves.split():
            REGISTERED[case].append(cls)

    @functools.cached_property
    def on_gpu(self):
        return device.is_cuda(self.device)

    @classmethod
    def variants(cls, on_gpu):
        """Return the rows of this class: itself, or one for each number of workers."""
        return [cls]

    @classmethod
    def lacks(cls):
        """Why it cannot be measured here although its package is installed; "" if it can."""
        return ""

    def served(self):
        """Return {path: bytes} so far, if the library counts them."""
        return {}

    def close(self):
        """Release files, threads and mappings."""


class OpenedPeer(Peer):
    """`open` is the last part of making it."""

    def open(self):
        """Open files and start threads."""


def counted(*statistics):
    """Return {path: bytes} of engines' statistics; paths that served bytes alone."""
    found: collections.Counter[str] = collections.Counter()
    for one in statistics:
        found.update(one["bytes"])
    return +found


# ------------------------------------------------------------------------------------------------ loader, train


class BatchPeer(OpenedPeer):
    """Gives shuffled batches (B, *shape) on the device; a GPU widens them itself.

    It is complete when it is made, and its making is timed. A class has `epoch(epoch)`, an iterator
    of the epoch's batches. A batch is the caller's for good, unless `keeps_batches` is False: then
    it is valid until the next one is asked for.
    """

    keeps_batches = True
    first_batch_s: float | None = None  # as first_epoch_s, of what `settle` read; from construction
    first_epoch_s: float | None = None
    knows_ids = True  # else only their bytes show which samples came
    stored_as = ""  # the format of `data.copies` that it reads; "" is the data as it is
    saver: Any = None  # case=train: the AsyncPeer that saves checkpoints while this feeds the loop
    settings = ("source", "batch_size", "dtype", "seed", "engine", "device")

    def __init__(self, source, batch_size, dtype, seed, engine=None, device_name="cpu"):
        self.source, self.batch_size, self.dtype, self.seed = source, batch_size, dtype, seed
        self.engine, self.device = engine or {}, device_name
        self.as_int64 = dtype == "int64"
        self.widens_here = self.as_int64 and not self.on_gpu  # else the GPU does
        self.open()

    def shuffled(self, epoch):
        """Return the ids of an epoch's batches, drawn as torch's RandomSampler draws them."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.source.samples, generator=generator).split(self.batch_size)

    def settle(self):
        """Do what is not timed; return the next epoch, and (if not 0) set `first_batch_s`.

        If it reads a whole epoch first, it sets `first_epoch_s` too.
        """
        return 0

    def delivered(self, batches):
        """Return pinned batches on the GPU and widened; those for the CPU are as wanted."""
        if not self.on_gpu:
            return iter(batches)
        return (self.widened(device.send(batch, self.device)) for batch in batches)

    def widened(self, batch):
        return batch.to(torch.int64) if self.as_int64 else batch

    def expected_ids(self, epoch, batches):
        """Return the sample ids of each batch; None if only its bytes show them."""
        if not self.knows_ids or self.source.kind == "images":
            return [None] * batches
        return [ids.numpy() for ids in self.shuffled(epoch)[:batches]]

    def facts(self):
        """More fields of the row in results.json."""
        return {}

    def verdict(self):
        """One line that the loader itself says of the loop; "" if it says none."""
        return ""

    def may_stay_open(self):
        """Return whether the files' pages can be dropped meanwhile: not if mapped."""
        return self.path != "mmap"

    def close(self):
        for name in set(vars(self)) - set(self.settings):
            delattr(self, name)


def worker_counts(on_gpu):
    """One and two worker processes; to a GPU half as many as cores, and as many."""
    cores = len(os.sched_getaffinity(0))
    return sorted({max(1, cores // 2), cores}) if on_gpu else [1, 2]


class WorkersPeer(BatchPeer):
    """Has a `loader`: a DataLoader of torch's, or of a class that is made like it."""

    workers = 0
    loader: Any

    @classmethod
    def with_workers(cls, count):
        """Make the class of so many worker processes; 0 is the caller's own."""
        name = f"{cls.name}, {count} worker{'s' * (count != 1)}"
        return derived(cls, key=f"{cls.key}_{count}", name=name, workers=count)

    @property
    def loader_options(self):
        return {"num_workers": self.workers, "persistent_workers": self.workers > 0, "pin_memory": self.on_gpu}

    @property
    def data_loader(self):
        """The DataLoader that has the workers."""
        return self.loader

    def epoch(self, epoch):
        return self.delivered(self.loader)

    def may_stay_open(self):
        return super().may_stay_open() and self.workers == 0  # The CPU time of workers is known when they end.

    def close(self):
        iterator = getattr(self.data_loader, "_iterator", None)
        if iterator is not None:  # Not left to the collector: a row with 16 workers has hung there.
            iterator._shutdown_workers()
        super().close()


class ChoosesWorkers(WorkersPeer):
    """Comes before a WorkersPeer of case=train, which tries how many are fastest.

    Copies to a GPU go ahead on a stream of their own.
    """

    @classmethod
    def variants(cls, on_gpu):
        return [cls]

    @classmethod
    def choices(cls, on_gpu):
        return [cls.with_workers(count) for count in [0, *worker_counts(on_gpu)]]

    def delivered(self, batches):
        return device.copied_ahead(batches, self.device)

    def facts(self):
        return super().facts() | {"name": self.name, "workers": self.workers}


def saving(loader, saver, key, devices=("cpu", "cuda")):
    """Register the row of case=train whose loop also saves with `saver`, an AsyncPeer."""
    name, setting = f"{loader.name} + {saver.name}", f"the same as {loader.key}, and {saver.setting}"
    derived(loader, serves="train", key=key, name=name, setting=setting, saver=saver, devices=devices)


# ------------------------------------------------------------------------------------------------ load

WHOLE = ""  # the name of a tensor that is the whole file's data


class LoadPeer(OpenedPeer):
    """Loads a data.checkpoints.Checkpoint.

    Its files are opened by loading them. On the CPU it copies what a mapping would only promise, so
    that every row has moved its bytes. A class has `load()`, which returns {name: tensor on the
    device}, or {WHOLE: one tensor of all data bytes} if it knows no safetensors.
    """

    reads_torch_file = False

    def __init__(self, source, device_name, engine=None):
        self.source, self.device, self.engine = source, device_name, engine or {}
        self.open()

    @property
    def file(self):
        return self.source.path

    def copied(self, tensors):
        """Return copies of tensors that lie in a mapping, on the CPU."""
        return tensors if self.on_gpu else {name: tensor.clone() for name, tensor in tensors.items()}

    def buffer(self):
        return torch.empty(self.source.bytes, dtype=torch.uint8, device=self.device)


# ------------------------------------------------------------------------------------------------ checkpoint

THREADS = min(8, len(os.sched_getaffinity(0)))  # of torch's DCP


class CheckpointPeer(Peer):
    """Saves a dict of tensors to a file or folder, and fills tensors from one.

    Nothing is opened by making it. A class has `save(state, path)` if it `saves` a format, and
    `load(into, path)` if it `loads` one.
    """

    kinds: tuple[str, ...] = ("save", "load")
    caches: tuple[str, ...] = ("new", "replaced", "warm", "cold")  # no "replaced": it takes no older checkpoint's path
    saves = loads = ""  # formats; "" if it does not
    way_out, way_in = "write", "read"  # `path` of saving and loading
    is_stock = False  # It is the format's own library: it verifies what others save.
    durable = False  # Its bytes are on storage when it returns; else the bench syncs them, timed.

    def __init__(self, device_name, engine=None):
        self.device, self.engine = device_name, engine or {}

    def stated_bytes(self):
        """Host memory that the library itself says it takes; None if it says nothing."""
        return None


class AsyncPeer(CheckpointPeer):
    """Saves while the program goes on.

    A class has these methods:

    - `open(folder, state)`: tensors by name, as of all saves.
    - `save(state, step)` returns when `state` may change; on a GPU, by later work of its stream.
    - `is_done()`: whether `wait` would return at once.
    - `wait()` waits for the last save, and returns its path.
    """

    kinds, caches = ("async",), ("staged",)
    prunes = False  # removes older checkpoints itself

    def __init__(self, device_name, engine=None):
        super().__init__(device_name, engine)
        self.opened = contextlib.ExitStack()

    def close(self):
        self.opened.close()


def torch_dcp():
    """Import torch.distributed.checkpoint: half a second, before a row's first call."""
    return importlib.import_module("torch.distributed.checkpoint")


def flat_bytes(tensor):
    return tensor.view(-1).view(torch.uint8)


def fill(into, tensors):
    for name, target in into.items():
        target.copy_(tensors[name])


class DcpCheckpointPeer(CheckpointPeer):
    """Has torch's DCP save and load, with what `writing(path)` and `reading(path)` return."""

    saves = loads = "dcp"
    writing: Callable[[str], dict[str, Any]]
    reading: Callable[[str], dict[str, Any]]

    def __init__(self, device_name, engine=None):
        super().__init__(device_name, engine)
        torch_dcp()

    def save(self, state, path):
        torch_dcp().save({"model": state}, **self.writing(path), no_dist=True)

    def load(self, into, path):
        torch_dcp().load({"model": into}, **self.reading(path), no_dist=True)


class Borrowed(CheckpointPeer):
    """A LoadPeer as a row of case=checkpoint: its tensors are copied on the device."""

    library: Any = None
    loads, kinds, devices = "safetensors", ("load",), ("cuda",)

    def load(self, into, path):
        fill(into, self.library(types.SimpleNamespace(path=path), self.device).load())


def borrowed(library, serves=""):
    """Make the row of case=checkpoint of a LoadPeer that knows safetensors."""
    said = {name: getattr(library, name) for name in ("key", "name", "package", "__module__")}
    setting = f"{library.setting}; its tensors are then copied on the GPU"
    return derived(Borrowed, serves, **said, library=library, way_in=library.path, setting=setting)


# ------------------------------------------------------------------------------------------------ io


class TransferPeer(OpenedPeer):
    """Carries a data.transfers.Work between a file and a data.transfers.Memory.

    A class has `move(place, offsets)`, which carries one call's transfers, from or to the places
    from `place` on, and returns when all are complete. If `submit` is "async", it has
    `start(place, offset)` instead, which returns the future of one transfer.
    """

    submit = "sync"  # `threads` threads with a transfer each; "batch": `batch_calls` calls; "async": futures
    xfer = "cpu"  # or cpu_gpu (by way of host memory), gpu (straight), any: as the device asks
    caches: tuple[str, ...] = ("cold", "warm", "direct")

    def __init__(self, work, memory, device_name, engine):
        self.work, self.memory, self.device, self.engine = work, memory, device_name, engine or {}
        self.path = ""
        self.open()

    def shares(self):
        """Return how many transfers each of the calls under way carries."""
        if self.submit == "sync":
            return [1] * self.work.threads
        calls = min(self.work.batch_calls, self.work.depth)
        return [self.work.depth // calls + (at < self.work.depth % calls) for at in range(calls)]

    def commit(self):
        """Return when what was written is on storage, under its name."""

    def requests(self):
        """Return how many requests storage got; None if that is not known."""
        return None


# ------------------------------------------------------------------------------------------------ latency, tensor


class TensorPeer(OpenedPeer):
    """Reads and writes one uint8 tensor; whatever it makes before is kept.

    In state `replaced` a write makes a new file that then takes the old one's name, so a crash
    leaves one of the two whole. In state `in_place` it writes over the bytes of a file.

    A class has `read()`, which opens the file, as a program does for one tensor, and returns its
    first `tensor_bytes` bytes on the device. `write(tensor)` returns when the bytes are on storage.
    """

    kinds = ("read", "write")
    caches: tuple[str, ...] = ("warm", "cold", "replaced", "in_place")
    path = ""  # "" is by read and write
    tried = False  # case=tensor: only trying shows whether it works here
    direct = False  # needs a file system with O_DIRECT

    def __init__(self, file, tensor_bytes, state, device_name, engine=None):
        self.file, self.tensor_bytes, self.state, self.device = file, tensor_bytes, state, device_name
        self.engine = engine or {}
        self.open()

    @classmethod
    def can(cls, work, state, tensor_bytes):
        return work in cls.kinds and state in cls.caches

    def empty(self):
        return torch.empty(self.tensor_bytes, dtype=torch.uint8, device=self.device)


@contextlib.contextmanager
def replaced(path):
    """Yield the name of a file to write and sync, which then becomes `path`, synced."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        yield temporary
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(os.path.dirname(path))


class UnsyncedTensorPeer(TensorPeer):
    """A library that does not sync: its bytes are synced within the time.

    A class has `store(tensor, path)`, which writes the first bytes of a file, or of a new one.
    """

    store: Callable[..., None]

    def write(self, tensor):
        device.wait_for_stream(self.device)  # It has made what is to be written.
        if self.state == "in_place":
            self.store(tensor, self.file)
            sync(self.file)
            return
        with replaced(self.file) as temporary:
            self.store(tensor, temporary)
            sync(temporary)
