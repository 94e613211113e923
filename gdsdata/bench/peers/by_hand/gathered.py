"""By hand: each rank reads its part, and one all_gather does the rest: rows of case=replicas."""

from collections.abc import Callable

import torch
import torch.distributed as dist

import gdsdata
from gdsdata.bench.measure.system import PAGE
from gdsdata.bench.peers.by_hand.files import ReadintoThreads
from gdsdata.bench.peers.gdsdata.tensors import OfEngine
from gdsdata.bench.peers.replicas import ReplicaPeer


class Gathered(ReplicaPeer):
    """Its tensors are views of one buffer. A class has `fill(target, begin)`."""

    kinds = ("safetensors",)
    fill: Callable[..., None]

    def load(self):
        rank, ranks, size = dist.get_rank(), dist.get_world_size(), self.source.bytes
        part = -(-size // ranks)
        part += -part % PAGE
        whole = torch.empty(part * ranks, dtype=torch.uint8, device=self.device)
        begin = min(rank * part, size)
        if begin < size:
            self.fill(whole[begin : min(begin + part, size)], begin)
        dist.all_gather_into_tensor(whole, whole[rank * part : (rank + 1) * part])
        return {name: whole[begin:end] for name, (begin, end) in self.source.tensors.items()}


class GatheredByEngine(OfEngine, Gathered, serves="replicas"):
    key, name = "all_gather", "By hand: a part each, all_gather"
    setting = "gdsdata.Engine.read of each rank's part into one buffer; then one all_gather_into_tensor"

    def fill(self, target, begin):
        with gdsdata.Engine(self.options) as engine:
            engine.read(self.source.path, into=target, offset=self.source.start + begin).result()


class GatheredByThreads(Gathered, ReadintoThreads, serves="replicas"):
    key, name = "all_gather_readinto", "By hand: readinto, all_gather"
    setting = f"the same with Python's readinto: {ReadintoThreads.setting.removeprefix('the same ')}"
