"""gdsdata.save and load, and what else a user would save and load a checkpoint with.

A peer is a class: `Peer(device, engine)` opens nothing yet. `save(state, path)` writes a dict of
tensors to a file or a folder; where `durable` is False the bench syncs that within the time.
`load(into, path)` fills tensors that are there. `AsyncPeer` says what those do that save behind the
program. `served()` counts bytes by path, where the library does.

`saves` and `loads` name the formats, "" where there is none; STOCK says who reads a format for
verifying.
"""

import contextlib
import importlib
import os
import types
from pathlib import Path

import torch

from gdsdata.bench import case, data, device, load_peers

SUFFIXES = {"pt": ".pt", "safetensors": ".safetensors", "raw": ".bin"}  # other formats are folders
THREADS = min(8, len(os.sched_getaffinity(0)))


class CheckpointPeer:
    key = ""  # its name in case.rows
    name = ""
    setting = ""  # one sentence for the report
    package = ""  # what has to be installed
    way_out, way_in = "write", "read"  # how its bytes go, where it does not count them: write, read, mmap
    saves = loads = ""
    on_cpu = True
    replaces = True  # takes a path where an older checkpoint is
    durable = False  # what it saved is on storage when it returns

    def __init__(self, device_name, engine=None):
        self.device, self.engine = device_name, engine or {}

    @classmethod
    def lacks(cls):
        """Why the row cannot be had, though the package is installed; "" where it can."""
        return ""

    def save(self, state, path):
        raise NotImplementedError

    def load(self, into, path):
        raise NotImplementedError

    def served(self):
        return {}

    def stated_bytes(self):
        """Host memory that the library itself says it takes; None where it says nothing."""
        return None

    def close(self):
        pass


def flat_bytes(tensor):
    return tensor.view(-1).view(torch.uint8)


def fill(into, tensors):
    for name, target in into.items():
        target.copy_(tensors[name])


# ------------------------------------------------------------------------------------------------ gdsdata


class Counts:
    """Counts bytes by route, and the memory, of the engines that gdsdata uses while this is entered."""

    def __init__(self):
        self.before, self.most_bytes, self.engines = {}, 0, {}

    def __enter__(self):
        from gdsdata.io import engine

        self.module, self.kept_engine = engine, engine.kept_engine
        engine.kept_engine = self.noted
        return self

    def noted(self, options, where):
        found = self.kept_engine(options, where)
        self.engines.setdefault(id(found), (found, found.statistics()["bytes"]))
        return found

    def served(self):
        """{route: bytes}, of all the times it was entered."""
        counted = dict(self.before)
        for found, before in self.engines.values():
            for route, count in found.statistics()["bytes"].items():
                if count > before[route]:
                    counted[route] = counted.get(route, 0) + count - before[route]
        return counted

    def memory_bytes(self):
        """What the engines say that they take at most, the largest sum of those used at a time."""
        return max(self.most_bytes, sum(found.bounce_bytes for found, _ in self.engines.values()))

    def __exit__(self, *_):
        self.module.kept_engine = self.kept_engine
        self.before, self.most_bytes = self.served(), self.memory_bytes()
        self.engines.clear()


class Ours(CheckpointPeer):
    key, name = "gdsdata_pt", "gdsdata .pt"
    setting = "gdsdata.save, and gdsdata.load(into=), of a .pt file"
    saves = loads = "pt"
    durable = True
    needs = ()  # of gdsdata's names

    def __init__(self, device_name, engine=None):
        import gdsdata

        super().__init__(device_name, engine)
        self.options = gdsdata.EngineOptions(**self.engine)
        self.counts = Counts()

    @classmethod
    def lacks(cls):
        import gdsdata

        return "".join(f"gdsdata has no {name}" for name in cls.needs if not hasattr(gdsdata, name))

    def save(self, state, path):
        import gdsdata

        with self.counts:
            gdsdata.save(state, path, options=self.options)

    def load(self, into, path):
        import gdsdata

        with self.counts:
            gdsdata.load(path, into=into, options=self.options)

    def served(self):
        return self.counts.served()

    def stated_bytes(self):
        return self.counts.memory_bytes()


class OursSafetensors(Ours):
    key, name = "gdsdata_safetensors", "gdsdata .safetensors"
    setting = "the same of a .safetensors file"
    saves = loads = "safetensors"


class OursDcp(Ours):
    key, name = "gdsdata_dcp", "gdsdata DCP"
    setting = (
        "torch's dcp.save and dcp.load of {\"model\": state}, with gdsdata's GDSStorageWriter, GDSSavePlanner, "
        "GDSStorageReader and GDSLoadPlanner"
    )
    saves = loads = "dcp"
    needs = ("GDSStorageWriter",)

    def options_given(self):
        import gdsdata

        return {} if self.options == gdsdata.EngineOptions() else {"options": self.options}

    def save(self, state, path):
        import torch.distributed.checkpoint as dcp

        import gdsdata

        with self.counts:
            writer, planner = gdsdata.GDSStorageWriter(path, **self.options_given()), gdsdata.GDSSavePlanner()
            dcp.save({"model": state}, storage_writer=writer, planner=planner, no_dist=True)

    def load(self, into, path):
        import torch.distributed.checkpoint as dcp

        import gdsdata

        with self.counts:
            reader, planner = gdsdata.GDSStorageReader(path, **self.options_given()), gdsdata.GDSLoadPlanner()
            dcp.load({"model": into}, storage_reader=reader, planner=planner, no_dist=True)


# ------------------------------------------------------------------------------------------------ torch


class TorchSave(CheckpointPeer):
    key, name = "torch", "torch.save"
    setting = "torch.save; torch.load(map_location=, weights_only=True), whose tensors are then copied"
    saves = loads = "pt"

    def save(self, state, path):
        torch.save(state, path)

    def load(self, into, path):
        fill(into, torch.load(path, map_location=self.device, weights_only=True))


class TorchLoadMapped(CheckpointPeer):
    key, name = "torch_mmap", "torch.load, mmap"
    setting = "torch.load(mmap=True, weights_only=True), whose tensors are then copied out of the mapping"
    loads = "pt"
    way_in = "mmap"

    def load(self, into, path):
        fill(into, torch.load(path, map_location="cpu", mmap=True, weights_only=True))


class TorchDcp(CheckpointPeer):
    key, name = "dcp", "torch DCP"
    setting = (
        f'dcp.save of {{"model": state}} with FileSystemWriter(thread_count={THREADS}, sync_files=True), and dcp.load '
        "with FileSystemReader"
    )
    saves = loads = "dcp"

    def save(self, state, path):
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, thread_count=THREADS, sync_files=True)
        dcp.save({"model": state}, storage_writer=writer, no_dist=True)

    def load(self, into, path):
        import torch.distributed.checkpoint as dcp

        dcp.load({"model": into}, storage_reader=dcp.FileSystemReader(path), no_dist=True)


# ------------------------------------------------------------------------------------------------ libraries


class Safetensors(CheckpointPeer):
    key, name = "safetensors", "safetensors"
    setting = "save_file; safe_open(device=), each tensor of which is copied (on the CPU, out of the mapped file)"
    package = "safetensors"
    saves = loads = "safetensors"
    way_in = "mmap"

    def save(self, state, path):
        from safetensors.torch import save_file

        save_file(state, path)

    def load(self, into, path):
        from safetensors import safe_open

        with safe_open(path, framework="pt", device=self.device) as file:
            for name, target in into.items():
                target.copy_(file.get_tensor(name))


class TorchSnapshot(CheckpointPeer):
    key, name = "torchsnapshot", "torchsnapshot"
    setting = "Snapshot.take and Snapshot.restore, defaults"
    package = "torchsnapshot"
    saves = loads = "torchsnapshot"
    replaces = False

    def save(self, state, path):
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(path, {"state": StateDict(state)})

    def load(self, into, path):
        from torchsnapshot import Snapshot, StateDict

        restored = StateDict(into)
        Snapshot(path).restore({"state": restored})
        fill({name: target for name, target in into.items() if restored[name] is not target}, restored)


class TorchCheckpointing(CheckpointPeer):
    """Its direct I/O, which is its default, ends with EINVAL where a file's length is no multiple of a page (0.1.1)."""

    key, name = "torch_checkpointing", "torch_checkpointing"
    setting = "CheckpointManager with_sync_save, LocalFileSystemStorageConfig(use_direct_io=False)"
    package = "torch_checkpointing"
    saves = loads = "torch_checkpointing"
    way_in = "mmap"
    replaces = False

    def __init__(self, device_name, engine=None):
        super().__init__(device_name, engine)
        manager = importlib.import_module("torch_checkpointing").CheckpointManager
        storage = importlib.import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig
        config = manager.Config.with_sync_save()
        config.storage_config = storage(use_direct_io=False)
        self.manager = manager(config)

    def save(self, state, path):
        self.manager.save(path, {"state": state})

    def load(self, into, path):
        self.manager.load(path, into={"state": into})

    def close(self):
        self.manager.close()


class Kvikio(CheckpointPeer):
    key, name = "kvikio", "kvikio, 16 threads"
    setting = (
        "kvikio.CuFile: pwrite of every tensor into one bare file; pread of every tensor of a safetensors file, whose "
        "header is read by hand; 16 threads, tasks of 16 MiB"
    )
    package = "kvikio"
    saves, loads = "raw", "safetensors"
    on_cpu = False

    def __init__(self, device_name, engine=None):
        import kvikio.defaults

        super().__init__(device_name, engine)
        kvikio.defaults.set(load_peers.KvikioTuned.options)
        self.way_out = self.way_in = "POSIX" if kvikio.defaults.is_compat_mode_preferred() else "cuFile"

    def save(self, state, path):
        import kvikio

        with kvikio.CuFile(path, "w") as file:
            at, under_way = 0, []
            for flat in map(flat_bytes, state.values()):
                under_way.append(file.pwrite(flat, flat.nbytes, at))
                at += flat.nbytes
            self.all_moved(path, at, under_way)

    def load(self, into, path):
        import kvikio

        source = data.describe_safetensors(path, "", "")
        with kvikio.CuFile(path, "r") as file:
            begins = {name: source.start + begin for name, (begin, _) in source.tensors.items()}
            wanted = [(flat_bytes(tensor), begins[name]) for name, tensor in into.items()]
            under_way = [file.pread(flat, flat.nbytes, begin) for flat, begin in wanted]
            self.all_moved(path, source.bytes, under_way)

    def all_moved(self, path, due_bytes, under_way):
        moved = sum(one.get() for one in under_way)
        if moved != due_bytes:
            raise EOFError(f"{path}: kvikio moved {moved:,} of {due_bytes:,} bytes")


class Borrowed(CheckpointPeer):
    """A library that makes tensors of its own, which are then copied on the device."""

    library = None
    loads = "safetensors"
    on_cpu = False

    def load(self, into, path):
        fill(into, self.library(types.SimpleNamespace(path=path), self.device).load())


def borrowed(library):
    """The row of a peer of case=load that knows safetensors."""
    said = {name: getattr(library, name) for name in ("key", "name", "package")}
    setting = f"{library.setting}; its tensors are then copied on the GPU"
    said |= {"library": library, "way_in": library.path, "setting": setting}
    return type(library.__name__, (Borrowed,), said)


ROWS = [
    Ours,
    OursSafetensors,
    OursDcp,
    TorchSave,
    TorchLoadMapped,
    Safetensors,
    TorchDcp,
    TorchCheckpointing,
    TorchSnapshot,
    *map(borrowed, (load_peers.InstantTensor, load_peers.InstantTensorBuffered, load_peers.FastSafetensors)),
    Kvikio,
]


# ------------------------------------------------------------------------------------------------ verifying


class Plain:
    """Tensors that lie one after the other in a bare file, by plain reading."""

    def __init__(self, device_name):
        pass

    def load(self, into, path):
        with open(path, "rb", buffering=0) as file:
            for tensor in into.values():
                data.read_exactly(file, flat_bytes(tensor))


STOCK = {"raw": Plain, "pt": TorchSave, "safetensors": Safetensors, "dcp": TorchDcp}
STOCK |= {peer.saves: peer for peer in (TorchCheckpointing, TorchSnapshot)}


def writer_of(file_format, by):
    """The class that writes the files of that format which are loaded: gdsdata's where `by` says so and it is there."""
    stock = next((peer for peer in ROWS if peer is STOCK[file_format]), None)
    ours = [peer for peer in (Ours, OursSafetensors, OursDcp) if peer.saves == file_format and not peer.lacks()]
    return ours[0] if by == "gdsdata" and ours else stock


# ------------------------------------------------------------------------------------------------ async

STAGING_SPARE_BYTES = 64 * 2**20  # for what lies between tensors


class AsyncPeer(CheckpointPeer):
    prunes = False  # removes older checkpoints itself

    def __init__(self, device_name, engine=None):
        super().__init__(device_name, engine)
        self.opened = contextlib.ExitStack()

    def close(self):
        self.opened.close()

    def open(self, folder, state_bytes):
        raise NotImplementedError

    def save(self, state, step):
        """Returns when `state` may change: on a GPU, by what its current stream is given from then on."""
        raise NotImplementedError

    def is_done(self):
        """Whether `wait` would return at once."""
        raise NotImplementedError

    def wait(self):
        """Until what was saved last is there; the path where it is."""
        raise NotImplementedError


class OursAsync(AsyncPeer):
    key, name = "gdsdata_async", "gdsdata.AsyncCheckpointer"
    setting = "gdsdata.AsyncCheckpointer with keep_last=1 and staging_bytes= for the whole state"
    durable = prunes = True
    copies_on_device = False

    @classmethod
    def lacks(cls):
        import gdsdata

        return "" if hasattr(gdsdata, "AsyncCheckpointer") else "gdsdata has no AsyncCheckpointer"

    def open(self, folder, state_bytes):
        import gdsdata

        self.folder, self.counts = folder, self.opened.enter_context(Counts())
        staging_bytes = state_bytes + STAGING_SPARE_BYTES
        self.checkpointer = gdsdata.AsyncCheckpointer(
            folder,
            keep_last=1,
            staging_bytes=staging_bytes,
            device_staging_bytes=state_bytes if self.copies_on_device else 0,
        )
        self.opened.callback(self.checkpointer.close)

    def save(self, state, step):
        self.handle = self.checkpointer.save(step, {"model": state})

    def is_done(self):
        return self.handle.done()

    def wait(self):
        self.handle.result()
        return self.folder

    def served(self):
        return self.counts.served()

    def stated_bytes(self):
        return self.counts.memory_bytes()


class OursAsyncOnDevice(OursAsync):
    key, name = "gdsdata_async_device", "gdsdata.AsyncCheckpointer, by a copy on the GPU"
    setting = f"{OursAsync.setting}, and device_staging_bytes= as well"
    on_cpu, copies_on_device = False, True


class TorchAsync(AsyncPeer):
    key, name = "dcp_async", "torch dcp.async_save"
    setting = (
        f"dcp.async_save in threads, FileSystemWriter(thread_count={THREADS}, sync_files=True); one DefaultStager for "
        "all saves, whose memory is used again: for a GPU pinned, with non-blocking copies; done when it returns. "
        "Where torch closes it (2.11): one FileSystemWriter(cache_staged_state_dict=True) for all saves"
    )

    def open(self, folder, state_bytes):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.folder, on_gpu = folder, device.is_cuda(self.device)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        self.opened.callback(self.stager.close)

    def save(self, state, step):
        import torch.distributed.checkpoint as dcp

        self.saved = os.path.join(self.folder, f"step-{step}")
        try:
            if self.stager is not None:
                writer = dcp.FileSystemWriter(self.saved, thread_count=THREADS, sync_files=True)
                more = {"storage_writer": writer, "async_stager": self.stager}
            else:
                more = {"storage_writer": self.caching, "checkpoint_id": self.saved}
            self.saving = dcp.async_save({"model": state}, no_dist=True, **more)
        except KeyError:
            if self.stager is None:
                raise
            # Torch 2.11 closes the stager behind the first save: the writer keeps what it stages
            # in, then.
            self.stager = None
            self.caching = dcp.FileSystemWriter(
                self.saved, thread_count=THREADS, sync_files=True, cache_staged_state_dict=True
            )
            self.save(state, step)

    def is_done(self):
        return self.saving.done()

    def wait(self):
        self.saving.result()
        return self.saved


ASYNC_ROWS = [OursAsync, OursAsyncOnDevice, TorchAsync]


def stock_tensors(folder, into):
    """What {"model": ...} of the one checkpoint below `folder` holds, read by the library whose format it is."""
    files = [Path(file) for file in data.Saved(folder).files]
    for file in files:
        if file.name == ".metadata":
            TorchDcp("cpu").load(into, str(file.parent))
            return into
    for file in files:
        if file.suffix == ".pt":
            return torch.load(file, map_location="cpu", weights_only=True)["model"]
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    names = ", ".join(file.name for file in files) or "nothing"
    raise ValueError(f"{folder}: no checkpoint that DCP, torch or safetensors read, but {names}")


def find(key):
    """The class of that key, or the one at package.module:Class."""
    return case.find(key, [*ROWS, *ASYNC_ROWS])
