"""The rows of benchmarks/once.py that its own ranks take: HSDP restores, and shuffled records.

`rows` names the rows of a class. `take` takes a turn of one: it yields the work that is timed, and
then how many bytes this rank got. These are compared with what was written.
"""

import os
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import gdsdata
from gdsdata import formats
from gdsdata.bench.cases.replicas.rank import Rank
from gdsdata.bench.measure import device as devices
from gdsdata.bench.measure import system
from gdsdata.bench.peers.protocols import Peer

WIDTH = 4096  # elements of bfloat16 in a row of the model's tensors
TENSOR_BYTES = 64 << 20
RECORD = 512  # elements of int64: 4 KiB
BATCH = 2048
REPLICAS = 2


class OnceRank(Rank):
    """One rank, which all rows of a class share. A class has `rows`, `files`, `make` and `take`."""

    def set_up(self):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.settings.ranks))

    def find(self):
        return Peer  # None of its own: the bytes are moved here.

    def describe(self):
        return {}

    def made(self):
        """Return what `make` does."""
        return self.rows, [str(path) for path in self.files]

    def run(self, row):
        self.peer = self.peer_class()
        turn = self.take(row)
        work = next(turn)
        devices.synchronize(self.device)
        self.start_cpu_clock()
        found = self.timed(work)
        self.cpu_used = system.cpu_seconds() - self.cpu_before
        return found | {"bytes": next(turn)}


class Hsdp(OnceRank):
    """A model in two replicas, each of them sharded over half of the ranks, restored by DCP."""

    rows = ("gdsdata, read once", "gdsdata, by itself", "torch DCP")

    def make(self, folder, size_bytes):
        """Make a checkpoint of so many bytes, which the folder keeps."""
        self.folder = Path(folder) / f"hsdp-{size_bytes}"
        ranks = dist.get_world_size()
        self.mesh = init_device_mesh(
            torch.device(self.device).type, (REPLICAS, ranks // REPLICAS), mesh_dim_names=("replicate", "shard")
        )
        self.count = max(1, size_bytes // TENSOR_BYTES)
        self.height = size_bytes // self.count // (2 * WIDTH) // ranks * ranks
        if not (self.folder / ".metadata").exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of copies that it leaves out
                dcp.save(self._state(self._written), storage_writer=gdsdata.GDSStorageWriter(self.folder))
        self.files = sorted(self.folder.glob("*.distcp"))
        return self.made()

    def take(self, row):
        state = self._state(lambda at: torch.zeros(self._local_shape(), dtype=torch.bfloat16, device=self.device))
        once = {"planner": gdsdata.GDSLoadPlanner(read_once=row == "gdsdata, read once")}
        if row == "torch DCP":
            reader, once = dcp.FileSystemReader(self.folder), {}
        else:
            reader = gdsdata.GDSStorageReader(self.folder)

        def work():
            dcp.load(state, storage_reader=reader, **once)

        yield work
        got = [one.to_local() for one in state.values()]
        for at, tensor in enumerate(got):
            assert torch.equal(tensor, self._written(at)), f"tensor {at} is not what was written"
        yield sum(tensor.numel() * 2 for tensor in got)

    def _state(self, local):
        placements = (Replicate(), Shard(0))
        return {
            f"layer{at}": DTensor.from_local(local(at), self.mesh, placements, run_check=False)
            for at in range(self.count)
        }

    def _local_shape(self):
        return self.height // self.mesh["shard"].size(), WIDTH

    def _written(self, at):
        """Return this rank's part of a tensor: its values follow from their places."""
        rows, columns = self._local_shape()
        begin = self.mesh["shard"].get_local_rank() * rows
        place = torch.arange(begin, begin + rows, device=self.device)[:, None]
        return ((place * 31 + torch.arange(columns, device=self.device) + at * 7) % 251).to(torch.bfloat16)


class Records(OnceRank):
    """Shuffled records of 4 KiB to a data set of each rank at once; each takes all of them."""

    rows = ("gdsdata", "index_select by hand")

    def make(self, folder, size_bytes, files):
        """Make records of so many bytes in all, in files of equal parts that the folder keeps."""
        self.turn, device = 0, self.device
        self.count = size_bytes // (8 * RECORD) // files * files
        made = Path(folder) / f"records-{size_bytes}-{files}"
        self.files = [made / f"{at:05}.bin" for at in range(files)]
        if dist.get_rank() == 0 and not (made / "complete").exists():
            made.mkdir(parents=True, exist_ok=True)
            each = self.count // files
            for at, path in enumerate(self.files):
                (np.arange(at * each, (at + 1) * each)[:, None] + np.arange(RECORD)).tofile(path)
            (made / "complete").touch()
        dist.barrier()
        sharding = gdsdata.Sharding(rank=0, world_size=1)
        seed = dist.get_rank()
        self.dataset = gdsdata.GDSDataset(
            self.files,
            BATCH,
            formats.Records("int64", (RECORD,)),
            device=device,
            shuffle=True,
            seed=seed,
            sharding=sharding,
        )
        elements = self.count // files * RECORD
        self.windows = [
            torch.from_file(str(path), size=elements, dtype=torch.int64).view(-1, RECORD) for path in self.files
        ]
        on_gpu = devices.is_cuda(device)
        self.slots = devices.PinnedSlots(device, (BATCH, RECORD), torch.int64) if on_gpu else None
        for row in self.rows:  # the first epoch of each is compared as a whole
            for batch in self._batches(row):
                assert torch.equal(batch, batch[:, :1] + torch.arange(RECORD, device=device)), "not a record"
        return self.made()

    def take(self, row):
        found = []

        def work():
            for batch in self._batches(row):
                found.append(batch[:, 0].clone())

        yield work
        seen = torch.cat(found).sort().values
        assert torch.equal(seen, torch.arange(self.count, device=self.device)), "records are missing or repeated"
        yield self.count * RECORD * 8

    def _batches(self, row):
        self.turn += 1
        if row == "gdsdata":
            self.dataset.set_epoch(self.turn)
            yield from self.dataset
            return
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.turn))
        each = len(self.windows[0])
        for ids in order.split(BATCH):
            batch = self.slots.next()[: len(ids)] if self.slots else torch.empty((len(ids), RECORD), dtype=torch.int64)
            if len(self.windows) == 1:
                torch.index_select(self.windows[0], 0, ids, out=batch)
            else:
                there = batch.numpy()
                for place, one in enumerate(ids.tolist()):
                    there[place] = self.windows[one // each][one % each]
            yield self.slots.send(batch) if self.slots else batch
