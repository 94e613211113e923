"""gdsdata.save, load, DCP storage and AsyncCheckpointer: rows of case=checkpoint."""

import collections
import weakref
from typing import Any

import gdsdata
from gdsdata.bench.peers.protocols import AsyncPeer, CheckpointPeer, DcpCheckpointPeer, Peer, counted
from gdsdata.io import engine

STAGING_SPARE_BYTES = 64 * 2**20  # for what lies between tensors


class Counted(Peer):
    """Comes before a peer whose work alone uses engines that gdsdata keeps."""

    engine: dict[str, Any]

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.options = gdsdata.EngineOptions(**self.engine)
        here = [one for _, one in engine.engines_here()]
        self.before = weakref.WeakKeyDictionary((one, counted(one.statistics())) for one in here)

    def engines_used(self):
        """Return {engine: its bytes by path} since this was made, of engines that moved some."""
        since = {
            one: counted(one.statistics()) - self.before.get(one, collections.Counter())
            for _, one in engine.engines_here()
        }
        return {one: count for one, count in since.items() if count}

    def served(self):
        return sum(self.engines_used().values(), collections.Counter())

    def stated_bytes(self):
        return sum(one.bounce_bytes for one in self.engines_used())


class Pt(Counted, CheckpointPeer, serves="checkpoint"):
    key, name = "gdsdata_pt", "gdsdata .pt"
    setting = "gdsdata.save, and gdsdata.load(into=), of a .pt file"
    saves = loads = "pt"
    durable = True

    def save(self, state, path):
        gdsdata.save(state, path, options=self.options)

    def load(self, into, path):
        gdsdata.load(path, into=into, options=self.options)


class Safetensors(Pt, serves="checkpoint"):
    key, name = "gdsdata_safetensors", "gdsdata .safetensors"
    setting = "the same of a .safetensors file"
    saves = loads = "safetensors"


class Dcp(Counted, DcpCheckpointPeer, serves="checkpoint"):
    key, name = "gdsdata_dcp", "gdsdata DCP"
    setting = (
        "torch's dcp.save and dcp.load of {\"model\": state}, with gdsdata's GDSStorageWriter, GDSSavePlanner, "
        "GDSStorageReader and GDSLoadPlanner"
    )
    durable = True

    def writing(self, path):
        writer = gdsdata.GDSStorageWriter(path, options=self.options)
        return {"storage_writer": writer, "planner": gdsdata.GDSSavePlanner()}

    def reading(self, path):
        reader = gdsdata.GDSStorageReader(path, options=self.options)
        return {"storage_reader": reader, "planner": gdsdata.GDSLoadPlanner()}


class Async(Counted, AsyncPeer, serves="checkpoint"):
    key, name = "gdsdata_async", "gdsdata.AsyncCheckpointer"
    setting = "gdsdata.AsyncCheckpointer with keep_last=1 and staging_bytes= for the whole state"
    durable = prunes = True
    copies_on_device = False

    def open(self, folder, state):
        state_bytes = sum(tensor.nbytes for tensor in state.values())
        self.folder = folder
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


class AsyncOnDevice(Async, serves="checkpoint"):
    key, name = "gdsdata_async_device", "gdsdata.AsyncCheckpointer, by a copy on the GPU"
    setting = f"{Async.setting}, and device_staging_bytes= as well"
    devices, copies_on_device = ("cuda",), True
