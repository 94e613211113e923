"""The library of each checkpoint format: it verifies saves, and may write files."""

from pathlib import Path

import torch

from gdsdata.bench.data.checkpoints import Saved
from gdsdata.bench.data.pieces import read_exactly
from gdsdata.bench.harness.tables import is_ours
from gdsdata.bench.peers import registry
from gdsdata.bench.peers.protocols import flat_bytes


class BareFile:
    """Tensors that lie one after the other in a bare file, by plain reading."""

    def __init__(self, device_name):
        pass

    def load(self, into, path):
        with open(path, "rb", buffering=0) as file:
            for tensor in into.values():
                read_exactly(file, flat_bytes(tensor))


def reader_of(file_format):
    """The class that reads a format for verifying."""
    stock = [peer for peer in registry.registered("checkpoint") if peer.is_stock and peer.loads == file_format]
    return stock[0] if stock else BareFile


def writer_of(file_format, by):
    """The class that writes a format to load: gdsdata's, if `by` says so and it can."""
    ours = [peer for peer in registry.registered("checkpoint") if is_ours(peer.key) and peer.saves == file_format]
    return ours[0] if by == "gdsdata" and ours else reader_of(file_format)


def tensors_in(folder, into):
    """{"model": ...} of the one checkpoint below `folder`, by its own library."""
    files = [Path(file) for file in Saved(folder).files]
    for file in files:
        if file.name == ".metadata":
            reader_of("dcp")("cpu").load(into, str(file.parent))
            return into
    for file in files:
        if file.suffix == ".pt":
            return torch.load(file, map_location="cpu", weights_only=True)["model"]
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    names = ", ".join(file.name for file in files) or "nothing"
    raise ValueError(f"{folder}: no checkpoint that DCP, torch or safetensors read, but {names}")
