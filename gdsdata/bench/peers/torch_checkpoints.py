"""torch.save, torch.load and torch's DCP: rows of case=load, replicas, checkpoint, train."""

import os
from typing import Any

import torch

from gdsdata.bench.peers.protocols import THREADS, AsyncPeer, CheckpointPeer, LoadPeer, fill, torch_dcp
from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.replicas import BroadcastPeer, DcpPeer, ReplicaPeer, by_itself


@serves("load")
class TorchLoad(LoadPeer):
    key, name = "torch_load", "torch.load"
    setting = "torch.load(map_location=) of a .pt file with the same tensors"
    path = "read"
    reads_torch_file = True

    def load(self):
        return torch.load(self.source.torch_file, map_location=self.device)


@serves("load")
class TorchLoadMapped(TorchLoad):
    key, name = "torch_load_mmap", "torch.load, mmap"
    setting = "the same with mmap=True; on the CPU its tensors are copied out of the mapping"
    path = "mmap"

    def load(self):
        return self.copied(torch.load(self.source.torch_file, map_location=self.device, mmap=True))


# ------------------------------------------------------------------------------------------------ replicas


serves("replicas")(by_itself(TorchLoadMapped, "pt"))


@serves("replicas")
class LoadedByRank0(BroadcastPeer):
    key, name = "torch_broadcast", "torch.load mmap, broadcast"
    setting = "rank 0: torch.load(mmap=True, map_location=); then torch.distributed.broadcast of each tensor"
    library, kinds = TorchLoadMapped, ("pt",)


@serves("replicas")
class SetFromRank0(ReplicaPeer):
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


@serves("replicas")
class DcpOfRanks(DcpPeer):
    key, name = "dcp", "torch DCP"
    setting = 'dcp.load of {"model": tensors} with FileSystemReader, by all ranks'

    def load(self):
        return self.loaded(torch_dcp().FileSystemReader(self.source.place))


@serves("replicas")
class DcpOfRank0(BroadcastPeer, DcpOfRanks):
    key, name = "dcp_broadcast", "torch DCP, broadcast"
    setting = "rank 0: the same with no_dist=True; then torch.distributed.broadcast of each tensor"

    def read(self):
        return self.loaded(torch_dcp().FileSystemReader(self.source.place), no_dist=True)


# ------------------------------------------------------------------------------------------------ checkpoint


@serves("checkpoint")
class TorchSave(CheckpointPeer):
    key, name = "torch", "torch.save"
    setting = "torch.save; torch.load(map_location=, weights_only=True), whose tensors are then copied"
    saves = loads = "pt"
    is_stock = True

    def save(self, state, path):
        torch.save(state, path)

    def load(self, into, path):
        fill(into, torch.load(path, map_location=self.device, weights_only=True))


@serves("checkpoint")
class TorchCheckpointMapped(CheckpointPeer):
    key, name = "torch_mmap", "torch.load, mmap"
    setting = "torch.load(mmap=True, weights_only=True), whose tensors are then copied out of the mapping"
    loads, kinds = "pt", ("load",)
    way_in = "mmap"

    def load(self, into, path):
        fill(into, torch.load(path, map_location="cpu", mmap=True, weights_only=True))


@serves("checkpoint")
class TorchDcp(CheckpointPeer):
    key, name = "dcp", "torch DCP"
    setting = (
        f'dcp.save of {{"model": state}} with FileSystemWriter(thread_count={THREADS}, sync_files=True), and dcp.load '
        "with FileSystemReader"
    )
    saves = loads = "dcp"
    is_stock = True

    def __init__(self, device_name, engine=None):
        super().__init__(device_name, engine)
        self.dcp = torch_dcp()

    def save(self, state, path):
        writer = self.dcp.FileSystemWriter(path, thread_count=THREADS, sync_files=True)
        self.dcp.save({"model": state}, storage_writer=writer, no_dist=True)

    def load(self, into, path):
        self.dcp.load({"model": into}, storage_reader=self.dcp.FileSystemReader(path), no_dist=True)


@serves("checkpoint")
class TorchAsync(AsyncPeer):
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
        import torch.distributed.checkpoint as dcp

        self.saved = os.path.join(self.folder, f"step-{step}")
        try:
            if self.caching is None:
                writer = dcp.FileSystemWriter(self.saved, thread_count=THREADS, sync_files=True)
                more: dict[str, Any] = {"storage_writer": writer, "async_stager": self.stager}
            else:
                more = {"storage_writer": self.caching, "checkpoint_id": self.saved}
            self.saving = dcp.async_save({"model": state}, no_dist=True, **more)
        except KeyError:
            if self.caching is not None:
                raise
            # Torch 2.11 closes the stager after the first save.
            self.caching = dcp.FileSystemWriter(
                self.saved, thread_count=THREADS, sync_files=True, cache_staged_state_dict=True
            )
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
