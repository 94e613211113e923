"""load(group=), GDSLoadPlanner(read_once=) and Sharding(share_reads=): rows of case=replicas."""

import functools

import torch.distributed

import gdsdata
from gdsdata.bench.measure import device
from gdsdata.bench.peers.gdsdata.batches import Batches
from gdsdata.bench.peers.gdsdata.checkpoints import Counts
from gdsdata.bench.peers.registry import derived, serves
from gdsdata.bench.peers.replicas import DcpPeer, ReplicaPeer


def with_alone(peer):
    """Register a row, and the same without the group."""
    setting = f"the same by each rank for itself, {peer.without}"
    alone = {"key": f"{peer.key}_alone", "name": f"{peer.name}, by itself", "setting": setting, "together": False}
    serves("replicas")(peer)
    serves("replicas")(derived(peer, **alone))
    return peer


class Counted(ReplicaPeer):
    together = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.options, self.counts = gdsdata.EngineOptions(**self.engine), Counts()

    def served(self):
        return self.counts.served()


@with_alone
class Load(Counted):
    key, name, without = "gdsdata", "gdsdata", "without group="
    setting = 'gdsdata.load(group="auto"): the ranks read once what all want'
    kinds, together = ("safetensors", "pt"), True

    def load(self):
        group = "auto" if self.together else None
        with self.counts:
            return gdsdata.load(self.source.place, self.device, group=group, options=self.options)


@with_alone
class Dcp(DcpPeer, Counted):
    key, name, without = "gdsdata", "gdsdata", "with read_once=False"
    setting = "torch's dcp.load with gdsdata's GDSStorageReader and GDSLoadPlanner(read_once=True)"
    together = True

    def load(self):
        reader = gdsdata.GDSStorageReader(self.source.place, options=self.options)
        with self.counts:
            return self.loaded(reader, planner=gdsdata.GDSLoadPlanner(read_once=self.together))


@functools.cache
def mesh_of(kind):
    """Return a mesh in which all ranks get the same batches."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (1, torch.distributed.get_world_size()), mesh_dim_names=("dp", "tp"))


@with_alone
class Volumes(Batches):
    key, name, without = "gdsdata", "gdsdata", "with share_reads=False"
    setting = "GDSDataset with Sharding(share_reads=True): each rank reads its part of every batch"
    kinds, together = ("volumes",), True

    def sharding(self):
        mesh = mesh_of("cuda" if device.is_cuda(self.device) else "cpu")
        return gdsdata.Sharding(device_mesh=mesh, dp_dim="dp", share_reads=self.together)
