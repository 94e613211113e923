"""read_tensor, write_tensor and Engine: rows of case=load, latency and tensor."""

import functools
from typing import Any

import torch

import gdsdata
from gdsdata.bench.peers.gdsdata.transfers import CuFile
from gdsdata.bench.peers.protocols import WHOLE, LoadPeer, OpenedPeer, TensorPeer, counted
from gdsdata.io.calibration import calibrated
from gdsdata.io.engine import resolved, shared_engine


@functools.cache
def engine_of(options, device_name, path):
    """Return read_tensor's engine, kept for its counts (or, with options, later runs)."""
    where = resolved(device_name)
    return shared_engine(calibrated(options, path, where, measure=False), where)


class OfEngine(OpenedPeer):
    """Comes before a peer with a `file`: its engine's options and counts."""

    forced: dict[str, str] = {}  # options of the row itself
    engine: dict[str, Any]
    file: Any

    def open(self):
        self.options = gdsdata.EngineOptions(**self.engine | self.forced)
        self.shared = engine_of(self.options, self.device, self.file)

    def served(self):
        return counted(self.shared.statistics())


class Load(OfEngine, LoadPeer, serves="load"):
    key, name = "gdsdata", "gdsdata"
    setting = "gdsdata.read_tensor of the whole data as one uint8 tensor"

    def load(self):
        source = self.source
        if self.options != gdsdata.EngineOptions():  # read_tensor takes none.
            with gdsdata.Engine(self.options) as engine:
                return {WHOLE: engine.read(source.path, into=self.buffer(), offset=source.start).result()}
        shape = (source.bytes,)
        return {WHOLE: gdsdata.read_tensor(source.path, torch.uint8, shape, offset=source.start, device=self.device)}


class LoadTensors(Load, serves="load"):
    key, name = "gdsdata_engine", "gdsdata, Engine"
    setting = "gdsdata.Engine.read of each tensor, all asked for at once"

    def load(self):
        with gdsdata.Engine(self.options) as engine:
            futures = {}
            for name, (begin, end) in self.source.tensors.items():
                tensor = torch.empty(end - begin, dtype=torch.uint8, device=self.device)
                futures[name] = engine.read(self.source.path, into=tensor, offset=self.source.start + begin)
            return {name: future.result() for name, future in futures.items()}


class Tensor(OfEngine, TensorPeer, serves="latency tensor"):
    key, name = "gdsdata", "gdsdata"
    setting = "gdsdata.read_tensor and write_tensor; with engine.* settings, gdsdata.Engine and a new tensor a read"

    def open(self):
        super().open()
        # The two functions take no options.
        self.calls: Any = None if self.options == gdsdata.EngineOptions() else gdsdata.Engine(self.options)

    def read(self):
        if self.calls:
            return self.calls.read(self.file, into=self.empty()).result()
        return gdsdata.read_tensor(self.file, torch.uint8, (self.tensor_bytes,), device=self.device)

    def write(self, tensor):
        offset = 0 if self.state == "in_place" else None  # None: a new file takes the name
        if self.calls:
            self.calls.write(self.file, tensor, offset).result()
        else:
            gdsdata.write_tensor(tensor, self.file, offset)

    def close(self):
        if self.calls:
            self.calls.close()


class KeptTensor(Tensor, serves="latency tensor"):
    key, name = "gdsdata_engine", "gdsdata, Engine"
    setting = "gdsdata.Engine.read into one tensor that is kept, and Engine.write; one call at a time"

    def open(self):
        super().open()
        self.calls = self.calls or gdsdata.Engine(self.options)
        self.tensor = self.empty()

    def read(self):
        return self.calls.read(self.file, into=self.tensor).result()


class DirectTensor(KeptTensor, serves="tensor"):
    key, name = "gdsdata_direct", "gdsdata, bounce buffer"
    setting = "gdsdata_engine with direct=always: O_DIRECT, to and from a GPU by way of host memory"
    forced = {"direct": "always"}
    direct = True


class CuFileTensor(DirectTensor, serves="tensor"):
    key, name = "gdsdata_cufile", "gdsdata, cuFile"
    setting = "gdsdata_engine with direct=always and backend=cufile; the path says what cuFile made of it"
    forced = {"direct": "always", "backend": "cufile"}
    devices, tried = ("cuda",), True
    lacks = CuFile.lacks
