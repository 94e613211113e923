"""`save` and `load`.

They start the engine, and then import what does the work. The engine allocates its memory meanwhile
(H200: a first load of 8 GiB takes 20 ms less).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gdsdata.checkpoint.explanations import checked_path, torch_arguments_explained
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.open_object import open_path
from gdsdata.checkpoint.tensor_kinds import check_tensors_are_real
from gdsdata.checkpoint.tree import first_device
from gdsdata.checkpoint.urls import is_url, last_part
from gdsdata.io import engine
from gdsdata.io.captures import beside_captures
from gdsdata.io.options import EngineOptions, options_of
from gdsdata.progress_bars import bar
from gdsdata.whole_numbers import flag, shown

if TYPE_CHECKING:
    from gdsdata.collective.transfers import SharedReads

# Shorter loads need little of the engine's memory.
_LONG_LOAD_BYTES = 256 << 20


@collector_paused()
@beside_captures()
def save(value: Any, path: str | os.PathLike[str], *, options: EngineOptions | None = None) -> None:
    """Write a checkpoint: the whole file is on storage when this returns.

        gdsdata.save({"model": model.state_dict(), "step": step}, "model.pt")  # for torch.load
        gdsdata.save(model.state_dict(), "model.safetensors")  # for safetensors
        gdsdata.save(model.state_dict(), "s3://bucket/run/model.safetensors")  # an object

    After an error or a crash, ``path`` has what was there before.

    Bytes are written from where the tensors lie, or pass through the engine's own memory (see
    `EngineOptions`). In a .pt file, tensors below 64 KiB are copied first, at most 256 MiB at a
    time. Tensors must not change until this returns. In a .pt file, tensors that share memory are
    stored once. In a safetensors file, tensors are contiguous, and the file's metadata
    has the checksum of each.

    An object has the bytes that the file would have, and appears when all of them have arrived. It
    is sent in parts: 8 at a time, and about 3 more are in memory. The store chooses the size of a
    part, at least 5 MiB.

    Args:
        value: a dict of tensors if ``path`` ends in .safetensors, else anything that `torch.save`
            takes.
        path: of the file, or the URL of an object. Symbolic links are followed. The mode of a new
            file follows the umask. A file that is replaced keeps its mode, and its owner if this
            user may set it. A .pt file has no checksums after
            ``torch.serialization.set_crc32_options(False)``.
        options: of the engine; None: the defaults.

    Raises:
        ValueError: the safetensors format cannot express the value, or the memory of a tensor was
            freed, as FSDP frees it; the message has the name and the reason.
        RuntimeError: the .pt format cannot express it: tensors of different dtypes share memory. Or
            `FakeTensorMode` is active.
        FileNotFoundError: the folder of ``path``, or the bucket, does not exist.
        PermissionError: the store's credentials do not allow it.
        NotReplaceable: an `IoError`. No new file can replace ``path``: it is a bind-mounted file,
            its folder is not writable, or its file system takes files only from their beginning to
            their end (`rclone mount` without a cache). `torch.save` may still overwrite it in
            place; a crash during that leaves it damaged.
        IoError: the file cannot be written, or the disk is full.
        pickle.PicklingError, TypeError, AttributeError: a value cannot be pickled; the message has
            its name.

    Stream semantics: tensors on a GPU are read after all work that the current stream of that GPU
    has so far.
    """
    path = checked_path(path, "save")
    check_tensors_are_real("save")
    options = options_of(options)
    started = time.perf_counter()
    if not is_url(path):  # the bytes of an object do not pass through the engine
        # That of the CPU writes the headers even if all tensors are on a GPU.
        engine.kept_engine(options, torch.device("cpu")).prepare()
    from gdsdata.observe.times import note_checkpoint_stall

    with bar(f"saving {last_part(path)}"):
        if path.endswith(".safetensors"):
            from gdsdata.checkpoint import safetensors_file

            safetensors_file.save(value, path, options)
        else:
            from gdsdata.checkpoint.torch_zip import archive_writer

            archive_writer.save(value, path, options)
    note_checkpoint_stall(time.perf_counter() - started)


@torch_arguments_explained
@collector_paused()
@beside_captures()
def load(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    only: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    into: Any = None,
    strict: bool = True,
    verify: bool = False,
    weights_only: bool = True,
    group: Any = None,
    once: str | None = None,
    options: EngineOptions | None = None,
) -> Any:
    """Read a checkpoint.

    It is a file of `torch.save`, a safetensors file, or several of those with their
    ``*.index.json``.

        model.load_state_dict(gdsdata.load("model.pt", device="cuda"))
        gdsdata.load("model.safetensors", into=model.state_dict())
        gdsdata.load("s3://bucket/llama/model.safetensors.index.json", device="cuda")

    A model that was made on the "meta" device has no memory to fill. It takes the loaded tensors
    themselves:

        model.load_state_dict(gdsdata.load("model.safetensors", device="cuda"), assign=True)

    Ranks that want the same bytes read each of them once, and pass them on (NCCL between GPUs, gloo
    on the CPU). All ranks of the group call this:

        state = gdsdata.load("model.safetensors", device="cuda", group="auto")

    Bytes go straight into the tensors. A load needs only the engine's own memory besides (see
    `EngineOptions`). Tensors that shared memory when torch saved them share it again, except those
    in ``into``.

    The name of a tensor is the keys on the way to it, joined by dots ("optimizer.state.0.exp_avg").

    The file is opened once. If a rename replaces it meanwhile, as `save` does, everything comes
    from the file that was opened. If an index names many shards, some stay open: at most an eighth
    of the process's limit of descriptors.

    Args:
        path: of the file, or the URL of an object.
        device: of the loaded tensors, whatever device they were saved from. Not used with ``into``.
        only: shell patterns ("layers.0.*"). Values whose names match none are left out, also of
            lists, which get shorter. In ``into`` they stay as they are. They are not read either,
            if all data of the file belongs to plain tensors. Other objects, and tensors that are
            not plain (sparse, quantized), need all of the file. None: everything.
        dtype: the dtype of the result's floating-point tensors; they are cast on the device.
            Casts share memory only if they were the same tensor. Those within other objects (a
            module, a named tuple) stay as they are, with a warning. None: as they were saved.
        into: a tree of dicts, lists and tuples, as ``state_dict()`` returns it. Its tensors are
            filled where they are; they may be views, and on several devices. If two of them share
            memory and the file has other values for each, the later one is loaded, with a warning,
            as by ``load_state_dict``. Its other values are
            replaced in their dict or list, and a tuple that has some by a new one. A tensor that is
            not plain is filled by a copy from a tensor of its type. Otherwise it is refused before
            anything is changed.
        strict: require that the file and ``into`` have the same names. The file need have only one
            of the names of a tensor (tied weights). False: names in both are loaded, with a warning
            if there is none.
        verify: compare the checksum of every byte that is returned. Files of torch have one for
            each storage, and safetensors files that gdsdata wrote one for each tensor. If only a
            part of a storage is wanted, all of it is read once. Parts that no tensor gets, and
            those that cannot be read in place, go into memory of its own: at most 1 GiB (or one
            storage) at a time. The header of a safetensors file has a checksum too, which covers
            names, dtypes and shapes. A file without checksums is loaded with a warning.
        weights_only: torch's rules for what a pickle may make (`torch.load`).
        group: the ranks that read together: a process group, a `DeviceMesh` of one dimension (as
            ``mesh["dp"]``), or ``"auto"``: the default group, if torch.distributed has several
            ranks. They may ask for different tensors, and into different kinds of memory. Those
            that several want are read by one of them. With ``verify``, that one compares the
            checksum before it passes bytes on. An error on one rank is raised on all; some tensors
            of ``into`` may have been filled. Each rank needs up to 128 MiB more on the CPU, and on
            the GPU if that gets tensors below 1 MiB. If only torch can read a file, each rank reads
            all of it. None: this process alone.
        once: ``"node"``: each node reads by itself what its ranks want. ``"job"``: one rank of all
            nodes reads a piece, and sends it once to each other node. None: ``"job"`` for URLs and
            shared file systems (NFS, Lustre, ...), else ``"node"``.
        options: of the engine; None: the defaults.

    Returns:
        The saved value (from safetensors: a dict), or ``into`` (another tuple if that is one with
        other values than tensors). With ``only`` or ``dtype``, parameters are plain tensors.

    Raises:
        FileNotFoundError, IoError: the file cannot be opened or read, or is a folder.
        PermissionError: the store's credentials do not allow it.
        CorruptData: the file is damaged (with ``verify`` the message has the tensor's name), has
            none of these formats, or was changed in place meanwhile. With ``group``: ranks see
            different versions of it.
        ValueError: ``only`` matches no name; ``into`` has other names, shapes or (without
            ``dtype``) dtypes; or a tensor of ``into`` is on the meta device, or its memory was
            freed. Torch has no cast of a tensor to ``dtype``. With ``group``: ranks give different
            ``verify``, ``weights_only`` or ``once``, or make different calls.
        RankLost: a rank of ``group`` has ended, or was silent for five times
            ``options.stall_timeout_s``. A rank that reads is not silent.
        TypeError: an argument has another type, such as several paths, or a module as ``into``.
        pickle.UnpicklingError: ``weights_only`` forbids something in the file.
        RuntimeError, AttributeError, ...: other errors of `torch.load`, with the path.

    Stream semantics: the bytes are in place when this returns, for every stream.
    """
    options = options_of(options)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: give a torch.dtype, such as torch.bfloat16")
    only = None if only is None else _checked_patterns(only)
    strict, verify, weights_only = flag("strict", strict), flag("verify", verify), flag("weights_only", weights_only)

    def load_it(together: SharedReads | None) -> Any:
        return _load(path, device, only, dtype, into, strict, verify, weights_only, options, together)

    if group is None and once is None:
        return load_it(None)
    from gdsdata.collective.transfers import reads_together

    call = {"call": "load", "verify": verify, "weights_only": weights_only}
    with reads_together(group, once, call, options.stall_timeout_s) as together:
        return load_it(together)


def _load(
    path: str | os.PathLike[str],
    device: torch.device | str,
    only: Sequence[str] | None,
    dtype: torch.dtype | None,
    into: Any,
    strict: bool,
    verify: bool,
    weights_only: bool,
    options: EngineOptions,
    together: SharedReads | None,
) -> Any:
    path = checked_path(path, "load")
    target = engine.resolved(device)
    file = open_path(path)
    first = target if into is None else first_device(into)
    if first.type == "cuda" and _bytes_with(file) >= _LONG_LOAD_BYTES:
        engine.kept_engine(options, first).prepare()
    from gdsdata.checkpoint import loading

    with bar(f"loading {last_part(path)}"):
        if into is None:
            return loading.load_new(file, target, only, dtype, verify, weights_only, options, together)
        return loading.load_into(file, into, only, dtype, strict, verify, weights_only, options, together)


def _checked_patterns(only: Iterable[str]) -> list[str]:
    if isinstance(only, str):
        raise ValueError(f"only={only!r}: give a list of patterns, as only=[{only!r}]")
    patterns = list(only) if isinstance(only, Iterable) else [only]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f'only={shown(only)} must be a list of patterns, as only=["layers.0.*"]')
    return patterns


def _bytes_with(file: OpenFile) -> int:
    """Return about how many bytes belong to a file: with an index, the files beside it."""
    if not file.path.endswith(".json") or is_url(file.path):
        return file.size_bytes
    with os.scandir(os.path.dirname(file.path) or ".") as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".safetensors") and entry.is_file())
