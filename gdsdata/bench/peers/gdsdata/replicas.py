"""load(group=), GDSLoadPlanner(read_once=) and Sharding(share_reads=): rows of case=replicas."""

import functools

import torch.distributed

import gdsdata
from gdsdata.bench.peers.gdsdata.batches import Batches
from gdsdata.bench.peers.gdsdata.checkpoints import Counted
from gdsdata.bench.peers.registry import derived
from gdsdata.bench.peers.replicas import DcpPeer, ReplicaPeer


def alone(peer, without):
    """Register the same row without the group."""
    said = {"key": f"{peer.key}_alone", "name": f"{peer.name}, by itself"}
    setting = f"the same by each rank for itself, {without}"
    derived(peer, serves="replicas", **said, setting=setting, together=False)


class Load(Counted, ReplicaPeer, serves="replicas"):
    key, name = "gdsdata", "gdsdata"
    setting = 'gdsdata.load(group="auto"): the ranks read once what all want'
    kinds, together = ("safetensors", "pt"), True

    def load(self):
        group = "auto" if self.together else None
        return gdsdata.load(self.source.place, self.device, group=group, options=self.options)


alone(Load, "without group=")


class Dcp(Counted, DcpPeer, serves="replicas"):
    key, name = "gdsdata", "gdsdata"
    setting = "torch's dcp.load with gdsdata's GDSStorageReader and GDSLoadPlanner(read_once=True)"
    together = True

    def load(self):
        reader = gdsdata.GDSStorageReader(self.source.place, options=self.options)
        return self.loaded(reader, planner=gdsdata.GDSLoadPlanner(read_once=self.together))


alone(Dcp, "with read_once=False")


@functools.cache
def mesh_of(kind):
    """Return a mesh in which all ranks get the same batches."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (1, torch.distributed.get_world_size()), mesh_dim_names=("dp", "tp"))


class Volumes(Batches, serves="replicas"):
    key, name = "gdsdata", "gdsdata"
    setting = "GDSDataset with Sharding(share_reads=True): each rank reads its part of every batch"
    kinds, together = ("volumes",), True

    def sharding(self):
        mesh = mesh_of("cuda" if self.on_gpu else "cpu")
        return gdsdata.Sharding(device_mesh=mesh, dp_dim="dp", share_reads=self.together)


alone(Volumes, "with share_reads=False")
