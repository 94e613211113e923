"""Tensors that are loaded and saved: a file, a state from a seed, checksums."""

import dataclasses
import functools
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gdsdata.bench.data.made import PIECE_BYTES, DataError, data_folder, keep, remove, sync
from gdsdata.bench.data.pieces import read_exactly
from gdsdata.bench.data.sources import CaseSource, expand

# `State` has a random base of so many words, and its tensors begin so many words apart in it.
WORD_BYTES, BASE_WORDS, BASE_STEP, SMALL_BYTES = 8, 2**23, 104_729, 16 * 2**10
STATE_PIECE_BYTES = 64 * 2**20
DCP_FILES = 4  # of a made folder of DCP


@dataclass
class Checkpoint(CaseSource):
    """One safetensors file, and a .pt file of the same tensors ("" if none was made).

    `tensors` has the first and last byte (exclusive) of each, counted from `start`. `bytes` are
    those of all tensors, and `checksums` are set once they were taken, by name.
    """

    path: str
    torch_file: str
    start: int
    bytes: int
    tensors: dict
    dtype: str
    origin: str
    kind: str = "safetensors"
    checksums: dict = dataclasses.field(default_factory=dict)

    @property
    def files(self):
        return [self.path, *filter(None, [self.torch_file])]

    def facts(self):
        return {"tensors": len(self.tensors), "loaded_bytes": self.bytes}

    def summary(self):
        return f"{len(self.tensors):,} {self.dtype} tensors, {self.bytes / 2**20:,.0f} MiB; {self.origin}"


@dataclass
class State:
    """Tensors of random bits, the same on every device and in every process.

    One tensor in ten is small, as norms and biases are; the others share the rest of `bytes`
    equally. All have whole 64-bit words, and take the `dtypes` in turn.
    """

    bytes: int
    tensors: int
    dtypes: list
    seed: int

    def __post_init__(self):
        self.bytes -= self.bytes % WORD_BYTES
        self.bases = {}  # by device

    @property
    def layout(self):
        """[(name, dtype, bytes)]"""
        small = [index % 10 == 9 for index in range(self.tensors)]
        left, large = self.bytes - sum(small) * SMALL_BYTES, self.tensors - sum(small)
        found = []
        for index in range(self.tensors):
            size = SMALL_BYTES
            if not small[index]:
                size = left // large // WORD_BYTES * WORD_BYTES
                left, large = left - size, large - 1
            name = f"layers.{index}.{'bias' if small[index] else 'weight'}"
            found.append((name, getattr(torch, self.dtypes[index % len(self.dtypes)]), size))
        return found

    def empty(self, device):
        """Return zeroed tensors: their memory is touched, and has no older bytes."""
        return {
            name: torch.zeros(size // dtype.itemsize, dtype=dtype, device=device) for name, dtype, size in self.layout
        }

    def make(self, device):
        tensors = self.empty(device)
        for part, expected, _ in self.parts(tensors):
            part.copy_(expected)
        return tensors

    def check(self, tensors):
        """Raise ValueError for the first tensor that has not all of its bits."""
        for name, dtype, size in self.layout:
            found = tensors.get(name)
            if found is None or (found.dtype, found.nbytes) != (dtype, size):
                came = "none" if found is None else f"{found.nbytes:,} bytes of {found.dtype}"
                raise ValueError(f"tensor {name!r}: {came} came, {size:,} bytes of {dtype} were due")
        for part, expected, (name, at) in self.parts(tensors):
            if not torch.equal(part, expected):
                raise ValueError(f"tensor {name!r}: not all of its bytes are those that were saved, from byte {at} on")

    def parts(self, tensors):
        """Yield parts of each tensor beside the words due there, which are of one base."""
        for index, (name, _, size) in enumerate(self.layout):
            words, at, begin = tensors[name].view(torch.int64), 0, index * BASE_STEP % BASE_WORDS
            base = self.base_on(words.device)
            while at < size // WORD_BYTES:
                count = min(size // WORD_BYTES - at, BASE_WORDS - begin)
                yield words[at : at + count], base[begin : begin + count], (name, at * WORD_BYTES)
                at, begin = at + count, 0

    def base_on(self, device):
        if device not in self.bases:
            words = np.random.Generator(np.random.SFC64(self.seed)).integers(-(2**63), 2**63, BASE_WORDS, np.int64)
            self.bases[device] = torch.from_numpy(words).to(device)
        return self.bases[device]

    def summary(self):
        return f"{self.tensors:,} {' + '.join(self.dtypes)} tensors, {self.bytes / 2**20:,.0f} MiB of random bits"


@dataclass
class Saved(CaseSource):
    """A checkpoint on the disk: a file, or a folder of files."""

    path: str

    @property
    def files(self):
        if not os.path.isdir(self.path):
            return [self.path] if os.path.exists(self.path) else []
        return sorted(os.path.join(folder, name) for folder, _, names in os.walk(self.path) for name in names)

    def remove(self):
        remove(Path(self.path))

    def sync(self):
        """Sync its bytes and its names."""
        folders = {os.path.dirname(file) for file in self.files} | {os.path.dirname(self.path)}
        for path in [*self.files, *folders]:
            sync(path)


@dataclass
class OneFormat(Checkpoint):
    """A Checkpoint in one format alone; `place` is its file, or its folder of DCP."""

    place: str = ""

    @property
    def files(self):
        return Saved(self.place).files


def write_safetensors(target, size_bytes, tensor_bytes, seed, progress):
    """Write bf16 tensors of random bytes; the header is padded to whole pages."""
    header: dict[str, dict] = {}
    for at in range(0, size_bytes, tensor_bytes):
        end = min(at + tensor_bytes, size_bytes)
        header[f"tensor_{len(header):05}"] = {"dtype": "BF16", "shape": [(end - at) // 2], "data_offsets": [at, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    generator = np.random.Generator(np.random.SFC64(seed))
    with open(target, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for at in range(0, size_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, size_bytes - at)
            out.write(generator.integers(0, 2**64, -(-count // 8), np.uint64).view(np.uint8)[:count])
            progress(count)


def write_torch_file(target, checkpoint):
    """Write the same tensors by torch.save."""
    with open(target, "wb") as out:
        torch.save(mapped_tensors(checkpoint), out)


def write_dcp_folder(target, checkpoint):
    """Write {"model": the same tensors} by torch's DCP."""
    import torch.distributed.checkpoint as dcp  # takes half a second

    writer = dcp.FileSystemWriter(target, thread_count=DCP_FILES, sync_files=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no other rank saves
        dcp.save({"model": mapped_tensors(checkpoint)}, storage_writer=writer, no_dist=True)


def mapped_tensors(checkpoint):
    """Return {name: tensor} of a made file, which stays mapped."""
    tensors = {}
    for name, (begin, end) in checkpoint.tensors.items():
        mapped = np.memmap(checkpoint.path, np.uint8, "c", checkpoint.start + begin, (end - begin,))
        tensors[name] = torch.from_numpy(np.asarray(mapped)).view(torch.bfloat16)
    return tensors


def describe_safetensors(path, torch_file, origin):
    """Return the Checkpoint of a safetensors file, from its header.

    Raises:
        DataError: it is no such file, or shorter than its header says.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if 8 + length <= size else b"")
            header.pop("__metadata__", None)
            tensors = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
            dtypes = sorted({entry["dtype"].lower() for entry in header.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"data.path={path}: no safetensors file ({type(error).__name__}: {error})") from None
    count = max((end for _, end in tensors.values()), default=0)
    if not count or 8 + length + count > size:
        raise DataError(f"data.path={path}: its header promises {count:,} bytes of data, the file has {size:,} in all")
    return Checkpoint(path, torch_file, 8 + length, count, tensors, ", ".join(dtypes), origin)


def checkpoint_for(settings, case, with_torch_file, progress=lambda count: None):
    """Return the Checkpoint of the settings: the user's own file, or made."""
    if settings.path:
        files = expand(settings.path)
        if len(files) > 1:
            raise DataError(f"data.path={settings.path}: {len(files)} files; case=load reads one safetensors file")
        return describe_safetensors(files[0], "", f"your own: {files[0]}")
    folder, size, tensor = data_folder(settings), settings.size_bytes // 2 * 2, case.tensor_bytes
    parameters = {"kind": "safetensors", "size_bytes": size, "tensor_bytes": tensor, "seed": case.seed}
    name = f"bf16-{tensor}-{size}-{case.seed}"
    write = functools.partial(write_safetensors, size_bytes=size, tensor_bytes=tensor, seed=case.seed)
    made = keep(folder, f"{name}.safetensors", parameters, size, functools.partial(write, progress=progress))
    checkpoint = describe_safetensors(os.path.abspath(made), "", f"random: {made}")
    if with_torch_file:
        parameters = {**parameters, "kind": "torch.save"}
        kept = keep(folder, f"{name}.pt", parameters, size, lambda target: write_torch_file(target, checkpoint))
        checkpoint.torch_file = os.path.abspath(kept)
    return checkpoint


def in_format(name, checkpoint, settings):
    """Return the OneFormat of a Checkpoint: safetensors, pt or dcp.

    A folder of DCP is made and kept.
    """
    place = {"safetensors": checkpoint.path, "pt": checkpoint.torch_file}.get(name)
    if place is None:
        made, size = Path(checkpoint.path), checkpoint.bytes
        parameters = {"kind": "DCP", "of": made.name, "bytes": size, "files": DCP_FILES}
        write = functools.partial(write_dcp_folder, checkpoint=checkpoint)
        place = os.path.abspath(keep(data_folder(settings), f"{made.stem}-dcp", parameters, size, write))
    return OneFormat(**vars(checkpoint) | {"kind": name, "place": place})


def checksum(tensor, at=0):
    """Return the checksum of a flat uint8 tensor, taken on its own device.

    Each 64-bit word is multiplied by an odd number of its own, and all are summed modulo 2**64. Any
    one word that differs shows: an odd number times a difference is no multiple of 2**64. `at` is
    the place of the tensor's first word, so pieces of whole words can be summed one by one.
    """
    tail = -tensor.numel() % 8
    if tail:
        tensor = torch.cat([tensor, tensor.new_zeros(tail)])
    if tensor.storage_offset() % 8 or tensor.data_ptr() % 8:
        tensor = tensor.clone()
    words, total = tensor.view(torch.int64), 0
    for begin in range(0, len(words), STATE_PIECE_BYTES // 8):
        piece = words[begin : begin + STATE_PIECE_BYTES // 8]
        odd = torch.arange(len(piece), device=tensor.device).add_(at + begin).mul_(2).add_(1)
        total += int(odd.mul_(piece).sum())
    return total % 2**64


def checksums_of(checkpoint, progress=lambda count: None):
    """Return {name: checksum} of every tensor, by reading the file plainly."""
    buffer, found = torch.empty(STATE_PIECE_BYTES, dtype=torch.uint8), {}
    with open(checkpoint.path, "rb", buffering=0) as file:
        for name, (begin, end) in checkpoint.tensors.items():
            total = 0
            for at in range(0, end - begin, STATE_PIECE_BYTES):
                piece = buffer[: min(STATE_PIECE_BYTES, end - begin - at)]
                file.seek(checkpoint.start + begin + at)
                read_exactly(file, piece)
                total += checksum(piece, at // 8)
                progress(len(piece))
            found[name] = total % 2**64
    return found
