"""orbax, by JAX on the CPU: rows of case=replicas, in the tables of DCP.

The tensors are stored as words of 32 bits. orbax sends what the first replica has read by adding
zeros to it: denormal bfloat16 would become zeros, and NaNs would lose their bits.
"""

import functools
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed

from gdsdata.bench.data import checkpoints
from gdsdata.bench.data.made import keep
from gdsdata.bench.harness.server import free_ports
from gdsdata.bench.peers.replicas import ReplicaPeer

WORD_BYTES = 4


@functools.cache
def sharding_of_replicas():
    """Start JAX in this rank, and return the sharding of arrays that each rank has whole."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    jax.distributed.initialize(f"127.0.0.1:{port_of_rank0()}", ranks, rank)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(ranks, -1), ("replica", "part"))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def port_of_rank0():
    """Return a port that was free when rank 0 looked."""
    ports = free_ports(1)
    torch.distributed.broadcast_object_list(ports, 0)
    return ports[0]


def write_folder(target, checkpoint):
    """Write the tensors by orbax, without the other ranks."""
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0}, barrier_sync_key_prefix="alone")
    words = {
        name: tensor.view(torch.int32).numpy().view(np.uint32)
        for name, tensor in checkpoints.mapped_tensors(checkpoint).items()
    }
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as saver:
        saver.save(target, ocp.args.PyTreeSave(words))


class SingleReplica(ReplicaPeer, serves="replicas"):
    key, name, package = "orbax", "orbax, single replica", "orbax.checkpoint"
    setting = (
        "orbax's PyTreeRestore with SingleReplicaArrayHandler: rank 0 reads, and sends by JAX's gloo; "
        "the tensors are stored as uint32"
    )
    kinds, devices, path = ("dcp",), ("cpu",), "rank 0"
    caches: tuple[str, ...] = ("warm",)  # The bench drops DCP's files from the page cache, and not these.

    def open(self):
        self.sharding = sharding_of_replicas()
        if torch.distributed.get_rank() == 0:
            self.make_folder()
        torch.distributed.barrier()

    @property
    def folder(self):
        return Path(f"{self.source.place}-orbax")

    def make_folder(self):
        if any((end - begin) % WORD_BYTES for begin, end in self.source.tensors.values()):
            raise ValueError(f"orbax: the sizes of the tensors have to be multiples of {WORD_BYTES} bytes")
        made, size = self.folder, self.source.bytes
        parameters = {"kind": "orbax", "of": os.path.basename(self.source.path), "bytes": size}
        write = functools.partial(write_folder, checkpoint=self.source)
        keep(made.parent, made.name, parameters, size, write)

    def handler(self):
        """Return how arrays are read, and the class of their arguments."""
        import orbax.checkpoint as ocp

        return ocp.type_handlers.SingleReplicaArrayHandler(), ocp.type_handlers.SingleReplicaArrayRestoreArgs

    def load(self):
        import jax
        import orbax.checkpoint as ocp

        handler, argument = self.handler()
        arguments = {
            name: argument(
                sharding=self.sharding, global_shape=((end - begin) // WORD_BYTES,), dtype=np.dtype(np.uint32)
            )
            for name, (begin, end) in self.source.tensors.items()
        }
        kinds = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=kinds)) as loader:
            arrays = loader.restore(self.folder, args=ocp.args.PyTreeRestore(restore_args=arguments))
        arrays = jax.block_until_ready(arrays)
        return {name: torch.from_dlpack(array.addressable_data(0)) for name, array in arrays.items()}


class EachReplica(SingleReplica, serves="replicas"):
    key, name, path = "orbax_alone", "orbax, each rank", "read"
    setting = "the same with ArrayHandler: each rank reads all"

    def handler(self):
        import orbax.checkpoint as ocp

        return ocp.type_handlers.ArrayHandler(), ocp.ArrayRestoreArgs
