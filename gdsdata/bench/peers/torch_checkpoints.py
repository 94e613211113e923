"""torch.save, torch.load and torch's DCP: rows of case=load, replicas, checkpoint, train."""

import os
from typing import Any

import torch

from gdsdata.bench.peers.protocols import (
    THREADS,
    AsyncPeer,
    CheckpointPeer,
    DcpCheckpointPeer,
    LoadPeer,
    fill,
    torch_dcp,
)
from gdsdata.bench.peers.replicas import BroadcastPeer, DcpPeer, ReplicaPeer, by_itself


def dcp_writer(path, **more):
    return torch_dcp().FileSystemWriter(path, thread_count=THREADS, sync_files=True, **more)


class TorchLoad(LoadPeer, serves="load"):
    key, name = "torch_load", "torch.load"
    setting = "torch.load(map_location=) of a .pt file with the same tensors"
    path = "read"
    reads_torch_file = True

    def load(self):
        return torch.load(self.source.torch_file, map_location=self.device)


class TorchLoadMapped(TorchLoad, serves="load"):
    key, name = "torch_load_mmap", "torch.load, mmap"
    setting = "the same with mmap=True; on the CPU its tensors are copied out of the mapping"
    path = "mmap"

    def load(self):
        return self.copied(torch.load(self.source.torch_file, map_location=self.device, mmap=True))


# ------------------------------------------------------------------------------------------------ replicas


by_itself(TorchLoadMapped, "pt")


class LoadedByRank0(BroadcastPeer, serves="replicas"):
    key, name = "torch_broadcast", "torch.load mmap, broadcast"
    setting = "rank 0: torch.load(mmap=True, map_location=); then torch.distributed.broadcast of each tensor"
    library, kinds = TorchLoadMapped, ("pt",)


class SetFromRank0(ReplicaPeer, serves="replicas"):
    """The model is made within the time, as the tensors of other rows are."""

    key, name = "torch_from_rank0", "torch broadcast_from_rank0"
    setting = "rank 0: torch.load(mmap=True); then set_model_state_dict(broadcast_from_rank0=True) of a model"
    kinds, path = ("pt",), "rank 0"

    def load(self):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        model = torch.nn.ParameterDict(self.empty(torch.bfloat16))
        state: dict[str, Any] = {}
        if torch.distributed.get_rank() == 0:
            state = torch.load(self.source.torch_file, map_location="cpu", mmap=True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        return {name: parameter.detach() for name, parameter in model.items()}


class DcpOfRanks(DcpPeer, serves="replicas"):
    key, name = "dcp", "torch DCP"
    setting = 'dcp.load of {"model": tensors} with FileSystemReader, by all ranks'

    def load(self):
        return self.loaded(torch_dcp().FileSystemReader(self.source.place))


class DcpOfRank0(BroadcastPeer, DcpOfRanks, serves="replicas"):
    key, name = "dcp_broadcast", "torch DCP, broadcast"
    setting = "rank 0: the same with no_dist=True; then torch.distributed.broadcast of each tensor"

    def read(self):
        return self.loaded(torch_dcp().FileSystemReader(self.source.place), no_dist=True)


# ------------------------------------------------------------------------------------------------ checkpoint


class TorchSave(CheckpointPeer, serves="checkpoint"):
    key, name = "torch", "torch.save"
    setting = "torch.save; torch.load(map_location=, weights_only=True), whose tensors are then copied"
    saves = loads = "pt"
    is_stock = True

    def save(self, state, path):
        torch.save(state, path)

    def load(self, into, path):
        fill(into, torch.load(path, map_location=self.device, weights_only=True))


class TorchCheckpointMapped(CheckpointPeer, serves="checkpoint"):
    key, name = "torch_mmap", "torch.load, mmap"
    setting = "torch.load(mmap=True, weights_only=True), whose tensors are then copied out of the mapping"
    loads, kinds = "pt", ("load",)
    way_in = "mmap"

    def load(self, into, path):
        fill(into, torch.load(path, map_location="cpu", mmap=True, weights_only=True))


class TorchDcp(DcpCheckpointPeer, serves="checkpoint"):
    key, name = "dcp", "torch DCP"
    setting = (
        f'dcp.save of {{"model": state}} with FileSystemWriter(thread_count={THREADS}, sync_files=True), and dcp.load '
        "with FileSystemReader"
    )
    is_stock = True

    def writing(self, path):
        return {"storage_writer": dcp_writer(path)}

    def reading(self, path):
        return {"storage_reader": torch_dcp().FileSystemReader(path)}


class TorchAsync(AsyncPeer, serves="checkpoint"):
    key, name = "dcp_async", "torch dcp.async_save"
    setting = (
        f"dcp.async_save in threads, FileSystemWriter(thread_count={THREADS}, sync_files=True); one DefaultStager for "
        "all saves, whose memory is used again: for a GPU pinned, with non-blocking copies; done when it returns. "
        "Where torch closes it (2.11): one FileSystemWriter(cache_staged_state_dict=True) for all saves"
    )
    saving: Any = None
    caching: Any = None  # the writer that keeps the memory, once torch has closed the stager

    def open(self, folder, state):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.folder = folder
        copying = {"use_pinned_memory": self.on_gpu, "use_non_blocking_copy": self.on_gpu}
        self.stager = DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=False, **copying))
        self.opened.callback(self.stager.close)

    def save(self, state, step):
        self.saved = os.path.join(self.folder, f"step-{step}")
        staging = {"storage_writer": self.caching, "checkpoint_id": self.saved}
        if self.caching is None:
            staging = {"storage_writer": dcp_writer(self.saved), "async_stager": self.stager}
        try:
            self.saving = torch_dcp().async_save({"model": state}, no_dist=True, **staging)
        except KeyError:
            if self.caching is not None:
                raise
            # Torch 2.11 closes the stager after the first save.
            self.caching = dcp_writer(self.saved, cache_staged_state_dict=True)
            self.save(state, step)

    def is_done(self):
        return self.saving.done()

    def wait(self):
        self.saving.result()
        return self.saved


class TorchSaveUnsynced(AsyncPeer):
    key, name = "torch_save", "torch.save"
    setting = "torch.save over the file of the save before, which is not synced"

    def open(self, folder, state):
        self.folder = folder

    def save(self, state, step):
        torch.save({"model": state}, os.path.join(self.folder, "checkpoint.pt"))

    def wait(self):
        return self.folder


class DcpAsyncOneAtATime(TorchAsync):
    """Waits for the save before it: torch wants one at a time."""

    def save(self, state, step):
        if self.saving is not None:
            self.wait()
        super().save(state, step)
