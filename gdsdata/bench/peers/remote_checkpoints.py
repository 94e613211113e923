"""Checkpoints in a store: rows of case=remote."""

import functools
import io
import os

import torch

from gdsdata.bench.data import objects
from gdsdata.bench.peers.object_clients import AwsCrt, Feed, Obstore
from gdsdata.bench.peers.protocols import THREADS, CheckpointPeer, DcpCheckpointPeer
from gdsdata.bench.peers.registry import derived

PART_BYTES, CONNECTIONS = 8 * 2**20, 16


class Stored(CheckpointPeer):
    """Its paths are URLs. The environment names the store."""

    caches = ("cold", "new")
    way_in = way_out = "remote"
    durable = True
    fills = False  # the tensors that it is given; else `load` returns new ones


@functools.cache
def client_of(kind, bucket):
    """Return a RemotePeer, which the loads of a process share."""
    access = objects.own_access(bucket, "")
    return kind(objects.Objects(access, [], [], [], ""), CONNECTIONS, "cpu"), access.client()


class Downloaded(Stored):
    """Loads from memory that a client of the store has filled."""

    client: type
    kinds = ("load",)

    def load(self, into, path):
        bucket, key = objects.bucket_and_prefix(path)
        client, control = client_of(self.client, bucket)
        size = control.head_object(Bucket=bucket, Key=key)["ContentLength"]
        offsets = range(0, size, PART_BYTES)
        memory = io.BytesIO(bytes(size))
        with memory.getbuffer() as whole:

            def take(place, content):
                whole[offsets[place] : offsets[place] + PART_BYTES] = content

            client.read(Feed([objects.Piece(key, at, min(PART_BYTES, size - at)) for at in offsets]), take)
        return self.read(memory)

    def read(self, memory):
        if self.loads == "pt":
            return torch.load(memory, map_location=self.device, weights_only=True)
        from safetensors.torch import load

        return {name: tensor.to(self.device) for name, tensor in load(memory.getvalue()).items()}


def downloaded(client, loads):
    reads = {"pt": "torch.load", "safetensors": "safetensors.torch.load"}[loads]
    said = {"key": f"{client.key}_{loads}", "name": f"{client.name} + {reads}", "package": client.package}
    setting = f"{client.setting}, in parts of 8 MiB, {CONNECTIONS} at a time, and {reads} of the whole from memory"
    derived(Downloaded, serves="remote", **said, client=client, loads=loads, setting=setting)


for one in (Obstore, AwsCrt):
    for form in ("safetensors", "pt"):
        downloaded(one, form)


class FsspecDcp(Stored, DcpCheckpointPeer, serves="remote"):
    key, name, package = "fsspec_dcp", "torch DCP, s3fs", "s3fs"
    setting = (
        f'dcp.save of {{"model": state}} with torch\'s FsspecWriter(thread_count={THREADS}), and dcp.load with '
        "FsspecReader, over s3fs"
    )
    fills = True

    def writing(self, path):
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter

        return {"storage_writer": FsspecWriter(path, thread_count=THREADS, sync_files=False)}

    def reading(self, path):
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader

        return {"storage_reader": FsspecReader(path)}


def s3torch_options():
    """Return what every class of s3torchconnector takes."""
    from s3torchconnector import S3ClientConfig

    config = S3ClientConfig(throughput_target_gbps=100, force_path_style="AWS_ENDPOINT_URL" in os.environ)
    return {"region": os.environ["AWS_REGION"], "s3client_config": config}


class S3TorchDcp(FsspecDcp, serves="remote"):
    key, name, package = "s3torch_dcp", "s3torchconnector DCP", "s3torchconnector"
    setting = f"the same with s3torchconnector's S3StorageWriter(thread_count={THREADS}) and S3StorageReader"

    def writing(self, path):
        from s3torchconnector.dcp import S3StorageWriter

        return {"storage_writer": S3StorageWriter(path=path, thread_count=THREADS, **s3torch_options())}

    def reading(self, path):
        from s3torchconnector.dcp import S3StorageReader

        return {"storage_reader": S3StorageReader(path=path, **s3torch_options())}


class S3TorchPt(Stored, serves="remote"):
    key, name, package = "s3torch_pt", "s3torchconnector + torch.load", "s3torchconnector"
    setting = "torch.save to S3Checkpoint.writer, and torch.load(weights_only=True) of S3Checkpoint.reader"
    saves = loads = "pt"

    def open(self):
        from s3torchconnector import S3Checkpoint

        return S3Checkpoint(endpoint=os.environ.get("AWS_ENDPOINT_URL"), **s3torch_options())

    def save(self, state, path):
        with self.open().writer(path) as file:
            torch.save(state, file)

    def load(self, into, path):
        with self.open().reader(path) as file:
            return torch.load(file, map_location=self.device, weights_only=True)
