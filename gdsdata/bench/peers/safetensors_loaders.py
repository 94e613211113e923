"""Libraries that load safetensors files: rows of case=load, replicas and checkpoint."""

import os

import torch.distributed

from gdsdata.bench.measure import device
from gdsdata.bench.peers.protocols import LoadPeer, borrowed
from gdsdata.bench.peers.replicas import ReplicaPeer, by_itself, in_group


class InstantTensor(LoadPeer, serves="load"):
    key, name = "instanttensor", "InstantTensor"
    setting = "instanttensor.safe_open, defaults: direct I/O on a disk"
    package, devices = "instanttensor", ("cuda",)
    path = "direct I/O"
    policy = ""
    together = False

    def load(self):
        import instanttensor

        backend = getattr(instanttensor.BackendPolicy, self.policy) if self.policy else None
        arguments = {"framework": "pt", "device": device.index(self.device), "backend": backend}
        if self.together:
            arguments["process_group"] = torch.distributed.group.WORLD
        with instanttensor.safe_open(self.source.path, **arguments) as file:
            return dict(file.tensors())


class InstantTensorBuffered(InstantTensor, serves="load"):
    key, name = "instanttensor_buffered", "InstantTensor, buffered"
    setting = "the same with BackendPolicy.BUFFERED: through the page cache"
    path = "read"
    policy = "BUFFERED"


for library in (InstantTensor, InstantTensorBuffered):
    in_group(library, "process_group= of all ranks")
for library in (InstantTensor, InstantTensorBuffered):
    by_itself(library, "safetensors")
    borrowed(library, serves="checkpoint")


class FastSafetensors(LoadPeer, serves="load"):
    key, name = "fastsafetensors", "fastsafetensors"
    setting = "fastsafetensors.fastsafe_open(nogds=True), every tensor"
    package, devices = "fastsafetensors", ("cuda",)
    path = "read"
    together = False

    def load(self):
        import fastsafetensors

        name = f"cuda:{device.index(self.device)}"
        files, more = self.source.path, {}
        if self.together:
            files, more = {0: [files]}, {"pg": torch.distributed.group.WORLD}
        with fastsafetensors.fastsafe_open(files, device=name, nogds=True, **more) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dictionary)


in_group(FastSafetensors, "pg= of all ranks: rank 0 reads the file, and passes it on")
by_itself(FastSafetensors, "safetensors")
borrowed(FastSafetensors, serves="checkpoint")


class RunAi(ReplicaPeer, serves="replicas"):
    key, name = "runai_group", "RunAI streamer, distributed"
    setting = (
        "runai_model_streamer's SafetensorsStreamer.stream_file(device=, is_distributed=True), every tensor; over gloo "
        "by RUNAI_STREAMER_DIST=1"
    )
    package, kinds, devices = "runai_model_streamer", ("safetensors",), ("cpu", "cuda")
    path, together = "read", True

    def load(self):
        from runai_model_streamer import SafetensorsStreamer

        os.environ["RUNAI_STREAMER_DIST"] = "1"  # else gloo is not used
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.source.path, device=self.device, is_distributed=self.together)
            return dict(streamer.get_tensors())


class RunAiAlone(RunAi, serves="replicas"):
    key, name = "runai", "RunAI streamer"
    setting = "the same with is_distributed=False; each rank by itself"
    together = False
