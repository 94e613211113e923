"""What the bench reads: made once (text of Python's standard library, or random tensors), or the user's own files."""

import dataclasses
import glob
import json
import os
import shutil
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

MAKER = 1  # raise it when made data changes, so that older data sets are made anew
PIECE_BYTES = 16 * 2**20
# Of `State`: words of its random base, from one tensor's first word in it to the next one's, a
# small tensor's size.
WORD_BYTES, BASE_WORDS, BASE_STEP, SMALL_BYTES = 8, 2**23, 104_729, 16 * 2**10
LLMC_MAGIC, LLMC_HEADER_BYTES = 20240520, 1024  # karpathy/llm.c, dev/data/data_common.py: write_datafile


class DataError(ValueError):
    pass


@dataclass
class Source:
    """Files and how samples lie in them; everything a row needs to know. Sample ids count through `files` in order.

    tokens: file i holds `counts[i]` windows of seq_len + 1 tokens at `stride`, from byte
    `headers[i]`. npy: file i is one sample of `shape`, from byte `headers[i]`.
    """

    kind: str
    files: list
    dtype: str
    shape: list
    stride: int
    headers: list
    counts: list
    file_bytes: int
    origin: str

    @property
    def samples(self):
        return sum(self.counts)

    @property
    def itemsize(self):
        return np.dtype(self.dtype).itemsize

    @property
    def sample_bytes(self):
        return int(np.prod(self.shape)) * self.itemsize

    def as_dict(self):
        return dataclasses.asdict(self)

    def summary(self):
        what = f"windows of {self.shape[0]} {self.dtype} tokens at stride {self.stride}"
        if self.kind == "npy":
            what = f"volumes of {'x'.join(map(str, self.shape))} {np.dtype(self.dtype).name}"
        if self.kind == "images":
            what = f"JPEGs of {self.shape[1]}x{self.shape[2]} pixels in tars"
        return (
            f"{self.samples:,} {what}, {self.file_bytes / 2**20:,.0f} MiB in {len(self.files):,} file(s); {self.origin}"
        )


@dataclass
class Checkpoint:
    """One safetensors file, and a .pt file of the same tensors where that was made (else "").

    `tensors` has each one's first and last byte (exclusive), counted from `start`; `bytes` are
    those of all of them, and `checksums` their checksums by name, once they were taken.
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

    @property
    def file_bytes(self):
        return sum(map(os.path.getsize, self.files))

    def as_dict(self):
        return dataclasses.asdict(self)

    def summary(self):
        return f"{len(self.tensors):,} {self.dtype} tensors, {self.bytes / 2**20:,.0f} MiB; {self.origin}"


@dataclass
class State:
    """What a checkpoint is made of: random bits, the same on every device and in every process.

    One tensor in ten is small, as norms and biases are; the others share the rest of `bytes`
    equally. All are of whole 64-bit words. `dtypes` are given to them in turn.
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
        """Tensors of its names, dtypes and sizes, zeroed: so their memory is touched, and none holds what it held."""
        return {
            name: torch.zeros(size // dtype.itemsize, dtype=dtype, device=device) for name, dtype, size in self.layout
        }

    def make(self, device):
        tensors = self.empty(device)
        for part, expected, _ in self.parts(tensors):
            part.copy_(expected)
        return tensors

    def check(self, tensors):
        """Raises ValueError for the first tensor that has not all of its bits."""
        for name, dtype, size in self.layout:
            found = tensors.get(name)
            if found is None or (found.dtype, found.nbytes) != (dtype, size):
                came = "none" if found is None else f"{found.nbytes:,} bytes of {found.dtype}"
                raise ValueError(f"tensor {name!r}: {came} came, {size:,} bytes of {dtype} were due")
        for part, expected, (name, at) in self.parts(tensors):
            if not torch.equal(part, expected):
                raise ValueError(f"tensor {name!r}: not all of its bytes are those that were saved, from byte {at} on")

    def parts(self, tensors):
        """Each tensor's words in parts, each beside the words that belong there: tensors are windows of one base."""
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

    def as_dict(self):
        return dataclasses.asdict(self)

    def summary(self):
        return f"{self.tensors:,} {' + '.join(self.dtypes)} tensors, {self.bytes / 2**20:,.0f} MiB of random bits"


@dataclass
class Saved:
    """A checkpoint on the disk: a file, or a folder of files."""

    path: str

    @property
    def files(self):
        if not os.path.isdir(self.path):
            return [self.path] if os.path.exists(self.path) else []
        return sorted(os.path.join(folder, name) for folder, _, names in os.walk(self.path) for name in names)

    @property
    def file_bytes(self):
        return sum(map(os.path.getsize, self.files))

    def remove(self):
        remove(Path(self.path))

    def sync(self):
        """Its bytes, and its names, on storage."""
        folders = {os.path.dirname(file) for file in self.files} | {os.path.dirname(self.path)}
        for path in [*self.files, *folders]:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def default_folder():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata" / "bench"


# ------------------------------------------------------------------------------------------------ made data sets


def library_text():
    """The *.py files of this Python's standard library, one after the other, as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path for path in root.rglob("*.py") if "site-packages" not in path.parts and "dist-packages" not in path.parts
    ]
    text = b"".join(path.read_bytes() for path in sorted(files))
    if not text:
        raise DataError(f"no Python sources in {root} to make data from: give your own with data.path=")
    return np.frombuffer(text, np.uint8)


def tiled(text, start, count):
    """`count` bytes of the endlessly repeated text."""
    start %= len(text)
    return np.tile(text, -(-(start + count) // len(text)))[start : start + count]


def write_synced(path, *parts):
    with open(path, "wb") as out:
        for part in parts:
            out.write(part)
        out.flush()
        os.fsync(out.fileno())


def write_tokens(target, size_bytes, progress):
    text = library_text()
    with open(target, "wb") as out:
        for at in range(0, size_bytes // 2, PIECE_BYTES // 2):
            count = min(PIECE_BYTES // 2, size_bytes // 2 - at)
            out.write(tiled(text, at, count).astype("<u2"))
            progress(count * 2)
        out.flush()
        os.fsync(out.fileno())


def write_volumes(target, size_bytes, shape, progress):
    text = library_text()
    elements = int(np.prod(shape))
    target.mkdir()
    for index in range(max(1, size_bytes // (elements * 4))):
        values = tiled(text, index * elements, elements).astype(np.float32) / np.float32(255)
        with open(target / f"{index:06}.npy", "wb") as out:
            np.save(out, values.reshape(shape))
            out.flush()
            os.fsync(out.fileno())
        progress(elements * 4)


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def complete(target, manifest_path, parameters):
    try:
        manifest = json.loads(manifest_path.read_text())
    except (OSError, ValueError):
        return False
    if manifest.get("parameters") != parameters:
        return False
    files = sorted(target.glob("*")) if target.is_dir() else [target]
    try:
        return len(files) == manifest["files"] and sum(file.stat().st_size for file in files) == manifest["bytes"]
    except OSError:
        return False


def make(kind, folder, size_bytes, shape, progress=lambda count: None):
    """The path of the made data set, made now unless it is there and whole."""
    name = f"tokens-uint16-{size_bytes}.bin"
    if kind == "npy":
        name = f"npy-float32-{'x'.join(map(str, shape))}-{size_bytes}"
    # The text is part of the parameters only by version: tests may be installed or not, which
    # changes nothing measured.
    parameters = {
        "maker": MAKER,
        "kind": kind,
        "size_bytes": size_bytes,
        "shape": list(shape) if kind == "npy" else None,
    }

    def write(target):
        if kind == "tokens":
            write_tokens(target, size_bytes, progress)
        else:
            write_volumes(target, size_bytes, shape, progress)

    return keep(folder, name, parameters, size_bytes, write)


def keep(folder, name, parameters, size_bytes, write):
    """The path of what `write(path)` makes, made now unless it is there and whole.

    It is written under a temporary name, synced and renamed; its manifest (`<name>.json`) comes
    last, so a data set without a manifest is one whose making was interrupted, and is made again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, manifest_path = folder / name, folder / f"{name}.json"
    if complete(target, manifest_path, parameters):
        return target
    for stale in folder.glob(f"{name}.tmp-*"):
        if not alive(stale.name.rpartition("-")[2]):
            remove(stale)
    need_space(folder, f"the {parameters['kind']} data set", size_bytes, "data.size_bytes=")
    temporary = folder / f"{name}.tmp-{os.getpid()}"
    try:
        write(temporary)
        if target.exists():
            manifest_path.unlink(missing_ok=True)
            remove(target)
        os.rename(temporary, target)
    finally:
        remove(temporary)
    files = sorted(target.glob("*")) if target.is_dir() else [target]
    manifest = {
        "parameters": parameters,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "made_by": f"gdsdata.bench.data, version {MAKER}",
        "python": sys.version.split()[0],
    }
    written = folder / f"{name}.json.tmp-{os.getpid()}"
    write_synced(written, json.dumps(manifest, indent=2).encode())
    os.rename(written, manifest_path)
    return target


def need_space(folder, what, size_bytes, setting):
    """Raises DataError where the disk has not so much, and some to spare."""
    free, needed = shutil.disk_usage(folder).free, size_bytes + 64 * 2**20
    if free < needed:
        raise DataError(
            f"{folder} has {free / 2**20:,.0f} MiB free and {what} needs {needed / 2**20:,.0f}: set data.folder= to a "
            f"larger disk, or {setting} to less"
        )


def write_safetensors(target, size_bytes, tensor_bytes, seed, progress):
    """bf16 tensors of random bytes; the header is padded so that the data starts at a page."""
    header, at = {}, 0
    while at < size_bytes:
        end = min(at + tensor_bytes, size_bytes)
        header[f"tensor_{len(header):05}"] = {"dtype": "BF16", "shape": [(end - at) // 2], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    generator = np.random.Generator(np.random.SFC64(seed))
    with open(target, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for at in range(0, size_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, size_bytes - at)
            out.write(generator.integers(0, 2**64, -(-count // 8), np.uint64).view(np.uint8)[:count])
            progress(count)
        out.flush()
        os.fsync(out.fileno())


def write_torch_file(target, checkpoint):
    """The same tensors as torch.save writes them."""
    import torch

    tensors = {}
    for name, (begin, end) in checkpoint.tensors.items():
        mapped = np.memmap(checkpoint.path, np.uint8, "c", checkpoint.start + begin, (end - begin,))
        tensors[name] = torch.from_numpy(np.asarray(mapped)).view(torch.bfloat16)
    with open(target, "wb") as out:
        torch.save(tensors, out)
        out.flush()
        os.fsync(out.fileno())


# ------------------------------------------------------------------------------------------------ looking at files


def expand(path):
    """Files for a path, a folder or a glob, sorted."""
    path = os.path.expanduser(str(path))
    if os.path.isdir(path):
        found = [os.path.join(path, name) for name in os.listdir(path) if not name.startswith(".")]
        npy = [name for name in found if name.endswith(".npy")]
        found = npy or [name for name in found if name.endswith(".bin")]
        wanted = "*.npy or *.bin files"
    else:
        found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
        wanted = "such file"
    files = sorted(os.path.abspath(name) for name in found if os.path.isfile(name))
    if not files:
        raise DataError(f"data.path={path}: no {wanted} there")
    return files


def kind_of(path):
    return "npy" if expand(path)[0].endswith(".npy") else "tokens"


def read_npy_header(path):
    """(shape, dtype, payload's offset) of a C-ordered npy file."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if fortran or dtype.hasobject:
            raise DataError(
                f"{path}: the bench reads C-ordered arrays of numbers; this one is {dtype}, fortran={fortran}"
            )
        return list(shape), dtype, file.tell()


def describe_tokens(files, dtype, seq_len, stride, origin):
    item, stride = np.dtype(dtype).itemsize, stride or seq_len
    kept, headers, counts, total = [], [], [], 0
    for file in files:
        size = os.path.getsize(file)
        with open(file, "rb") as opened:
            start = opened.read(4)
        header = LLMC_HEADER_BYTES if start == np.int32(LLMC_MAGIC).tobytes() and size >= LLMC_HEADER_BYTES else 0
        tokens = (size - header) // item
        if tokens > seq_len:  # a shorter file has no window; formats.Tokens gives it none either
            kept.append(file)
            headers.append(header)
            counts.append((tokens - seq_len - 1) // stride + 1)
            total += size
    if not kept:
        raise DataError(
            f"{files[0]}{' and others' * (len(files) > 1)}: shorter than one sample of {seq_len + 1} {dtype} tokens"
        )
    return Source("tokens", kept, dtype, [seq_len + 1], stride, headers, counts, total, origin)


def describe_npy(files, origin):
    shape, dtype, header = read_npy_header(files[0])
    headers = [header]
    for file in files[1:]:
        other_shape, other_dtype, header = read_npy_header(file)
        if (other_shape, other_dtype) != (shape, dtype):
            raise DataError(
                f"{file} is {other_dtype} {other_shape}, {files[0]} {dtype} {shape}: batches need equal shapes"
            )
        headers.append(header)
    return Source(
        "npy", files, dtype.str, shape, 0, headers, [1] * len(files), sum(map(os.path.getsize, files)), origin
    )


def source_for(kind, settings, progress=lambda count: None):
    """The Source for `kind` ("tokens" or "npy") from DataSettings: the user's own path, or made."""
    if settings.path:
        files, origin = expand(settings.path), f"your own: {settings.path}"
    else:
        folder = Path(settings.folder).expanduser() if settings.folder else default_folder()
        made = make(kind, folder, settings.size_bytes, settings.shape, progress)
        files, origin = expand(made), f"Python's standard library sources, tiled: {made}"
    if kind == "npy":
        return describe_npy(files, origin)
    dtype = settings.dtype if settings.path else "uint16"
    return describe_tokens(files, dtype, settings.seq_len, settings.stride, origin)


def describe_safetensors(path, torch_file, origin):
    """From the file's own header; the bench knows no more of the format than where the bytes of a tensor are."""
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
    """The Checkpoint for DataSettings and LoadSettings: the user's own safetensors file, or made."""
    if settings.path:
        files = expand(settings.path)
        if len(files) > 1:
            raise DataError(f"data.path={settings.path}: {len(files)} files; case=load reads one safetensors file")
        return describe_safetensors(files[0], "", f"your own: {files[0]}")
    folder = Path(settings.folder).expanduser() if settings.folder else default_folder()
    size, tensor = settings.size_bytes // 2 * 2, case.tensor_bytes
    parameters = {"maker": MAKER, "kind": "safetensors", "size_bytes": size, "tensor_bytes": tensor, "seed": case.seed}
    name = f"bf16-{tensor}-{size}-{case.seed}"
    made = keep(
        folder,
        f"{name}.safetensors",
        parameters,
        size,
        lambda target: write_safetensors(target, size, tensor, case.seed, progress),
    )
    checkpoint = describe_safetensors(os.path.abspath(made), "", f"random: {made}")
    if with_torch_file:
        parameters = {**parameters, "kind": "torch.save"}
        kept = keep(folder, f"{name}.pt", parameters, size, lambda target: write_torch_file(target, checkpoint))
        checkpoint.torch_file = os.path.abspath(kept)
    return checkpoint


# ------------------------------------------------------------------------------------------------ what is right

STATE_PIECE_BYTES = 64 * 2**20


def checksum(tensor, at=0):
    """Of a flat uint8 tensor, on the device where it lies: its 64-bit words, each times an odd number of its own,
    summed modulo 2**64. Any one word that differs shows, for an odd number times a difference is no multiple of 2**64.

    `at` is the place of its first word in what the sum is of; pieces of whole words can so be
    summed one by one.
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
    """Of every tensor, by reading the file plainly."""
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


def read_exactly(file, tensor):
    """Fills a uint8 tensor on the CPU from an unbuffered file."""
    view, done = memoryview(tensor.numpy()), 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            raise EOFError(f"{file.name}: {len(view) - done} bytes are missing at its end")
        done += got


class Truth:
    """What a batch must be, by the plainest numpy there is; for verifying, never timed."""

    def __init__(self, source):
        self.source = source
        self.first_ids = np.concatenate([[0], np.cumsum(source.counts)])
        self.ids = None  # by checksum, once they are asked for

    def batch(self, ids, dtype):
        rows = [self.sample(int(index)) for index in ids]
        rows = np.stack(rows)
        return rows.astype(np.int64) if dtype == "int64" else rows

    def ids_of(self, batch, seen):
        """Which samples a batch's are, by their bytes, of those that are not in `seen`.

        Raises ValueError for one that is none of them.
        """
        if self.ids is None:
            self.ids = {}
            for index in range(self.source.samples):
                self.ids.setdefault(zlib.crc32(np.ascontiguousarray(self.sample(index))), []).append(index)
        found, seen = [], set(seen)
        for place, one in enumerate(batch):
            alike = self.ids.get(zlib.crc32(np.ascontiguousarray(one)), [])
            left = [index for index in alike if index not in seen]
            if not left:
                why = "came before in the epoch" if alike else "is none of the data's"
                raise ValueError(f"the sample at place {place} of a batch {why}")
            found.append(left[0])
            seen.add(left[0])
        return found

    def sample(self, index):
        source = self.source
        file = int(np.searchsorted(self.first_ids, index, side="right")) - 1
        if source.kind == "npy":
            return np.load(source.files[file])
        start = source.headers[file] + (index - int(self.first_ids[file])) * source.stride * source.itemsize
        with open(source.files[file], "rb") as opened:
            opened.seek(start)
            return np.frombuffer(opened.read(source.sample_bytes), source.dtype)
