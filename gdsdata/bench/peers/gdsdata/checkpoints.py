"""gdsdata.save, load, DCP storage and AsyncCheckpointer: rows of case=checkpoint."""

import collections

import gdsdata
from gdsdata.bench.peers.protocols import AsyncPeer, CheckpointPeer, torch_dcp
from gdsdata.bench.peers.registry import serves
from gdsdata.io import engine

STAGING_SPARE_BYTES = 64 * 2**20  # for what lies between tensors


class Counts:
    """While entered, counts bytes by route, and memory, of gdsdata's engines."""

    def __init__(self):
        self.before, self.most_bytes, self.engines = {}, 0, {}

    def __enter__(self):
        self.kept_engine, engine.kept_engine = engine.kept_engine, self.noted
        return self

    def noted(self, options, where):
        found = self.kept_engine(options, where)
        self.engines.setdefault(id(found), (found, found.statistics()["bytes"]))
        return found

    def served(self):
        """Return {route: bytes}, of all the times it was entered."""
        found = collections.Counter(self.before)
        for one, before in self.engines.values():
            found.update({route: count - before[route] for route, count in one.statistics()["bytes"].items()})
        return dict(+found)  # of more than 0

    def memory_bytes(self):
        """Return host memory that the engines say they take, of those used at one time."""
        return max(self.most_bytes, sum(found.bounce_bytes for found, _ in self.engines.values()))

    def __exit__(self, *_):
        engine.kept_engine = self.kept_engine
        self.before, self.most_bytes = self.served(), self.memory_bytes()
        self.engines.clear()


class Counted:
    """Comes before a CheckpointPeer whose `counts` are the engines'."""

    counts: Counts

    def served(self):
        return self.counts.served()

    def stated_bytes(self):
        return self.counts.memory_bytes()


@serves("checkpoint")
class Pt(Counted, CheckpointPeer):
    key, name = "gdsdata_pt", "gdsdata .pt"
    setting = "gdsdata.save, and gdsdata.load(into=), of a .pt file"
    saves = loads = "pt"
    durable = True

    def __init__(self, device_name, engine=None):
        super().__init__(device_name, engine)
        self.options = gdsdata.EngineOptions(**self.engine)
        self.counts = Counts()

    def save(self, state, path):
        with self.counts:
            gdsdata.save(state, path, options=self.options)

    def load(self, into, path):
        with self.counts:
            gdsdata.load(path, into=into, options=self.options)


@serves("checkpoint")
class Safetensors(Pt):
    key, name = "gdsdata_safetensors", "gdsdata .safetensors"
    setting = "the same of a .safetensors file"
    saves = loads = "safetensors"


@serves("checkpoint")
class Dcp(Pt):
    key, name = "gdsdata_dcp", "gdsdata DCP"
    setting = (
        "torch's dcp.save and dcp.load of {\"model\": state}, with gdsdata's GDSStorageWriter, GDSSavePlanner, "
        "GDSStorageReader and GDSLoadPlanner"
    )
    saves = loads = "dcp"

    def __init__(self, device_name, engine=None):
        super().__init__(device_name, engine)
        self.dcp = torch_dcp()

    def options_given(self):
        return {} if self.options == gdsdata.EngineOptions() else {"options": self.options}

    def save(self, state, path):
        with self.counts:
            writer, planner = gdsdata.GDSStorageWriter(path, **self.options_given()), gdsdata.GDSSavePlanner()
            self.dcp.save({"model": state}, storage_writer=writer, planner=planner, no_dist=True)

    def load(self, into, path):
        with self.counts:
            reader, planner = gdsdata.GDSStorageReader(path, **self.options_given()), gdsdata.GDSLoadPlanner()
            self.dcp.load({"model": into}, storage_reader=reader, planner=planner, no_dist=True)


@serves("checkpoint")
class Async(Counted, AsyncPeer):
    key, name = "gdsdata_async", "gdsdata.AsyncCheckpointer"
    setting = "gdsdata.AsyncCheckpointer with keep_last=1 and staging_bytes= for the whole state"
    durable = prunes = True
    copies_on_device = False

    def open(self, folder, state):
        state_bytes = sum(tensor.nbytes for tensor in state.values())
        self.folder, self.counts = folder, self.opened.enter_context(Counts())
        self.checkpointer = gdsdata.AsyncCheckpointer(
            folder,
            keep_last=1,
            staging_bytes=state_bytes + STAGING_SPARE_BYTES,
            device_staging_bytes=state_bytes if self.copies_on_device else 0,
        )
        self.opened.callback(self.checkpointer.close)
        self.checkpointer.prepare({"model": state})  # as restore does, with which programs begin

    def save(self, state, step):
        self.handle = self.checkpointer.save(step, {"model": state})

    def is_done(self):
        return self.handle.done()

    def wait(self):
        self.handle.result()
        return self.folder


@serves("checkpoint")
class AsyncOnDevice(Async):
    key, name = "gdsdata_async_device", "gdsdata.AsyncCheckpointer, by a copy on the GPU"
    setting = f"{Async.setting}, and device_staging_bytes= as well"
    devices, copies_on_device = ("cuda",), True
