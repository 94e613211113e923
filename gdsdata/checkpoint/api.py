"""`save` and `load`."""

from __future__ import annotations

import fnmatch
import functools
import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from gdsdata.checkpoint import safetensors_file
from gdsdata.checkpoint.explanations import checked_path, empty_file, foreign_file, torch_errors_explained
from gdsdata.checkpoint.nests import LEFT_OUT, Path, mapped, name_of, places
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.pause import collector_paused
from gdsdata.checkpoint.reading import Reading, Stored
from gdsdata.checkpoint.tensor_kinds import are_of_one_kind, copy_into, has_own_memory, is_plain, takes_copy_of
from gdsdata.checkpoint.torch_zip import archive_reader, archive_writer
from gdsdata.checkpoint.torch_zip.archive import Archive, open_archive
from gdsdata.checkpoint.torch_zip.archive_reader import unpickle_structure
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain
from gdsdata.checkpoint.writing import get_ready
from gdsdata.errors import CorruptData
from gdsdata.formats.parsers import safetensors_header
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions
from gdsdata.observe.report import note_checkpoint_stall
from gdsdata.torch_private import storage_id

_HEAD_BYTES = 64  # that tell a file's format


@collector_paused()
def save(value: Any, path: str | os.PathLike[str], *, options: EngineOptions | None = None) -> None:
    """Write a checkpoint, on storage when this returns: whole, or, after an error or a crash, what was there before.

        gdsdata.save({"model": model.state_dict(), "step": step}, "model.pt")     # torch.load reads it
        gdsdata.save(model.state_dict(), "model.safetensors")                     # safetensors reads it

    Bytes are written from where the tensors are, or from the engine's own memory (see `EngineOptions`); on a GPU behind
    what the current stream has been given before. Tensors must not change meanwhile. In a .pt file tensors that share
    memory are stored once. In a safetensors file tensors are contiguous, and a checksum of each is in its metadata.

    Args:
        value: to a name that ends in .safetensors a dict of tensors, else whatever `torch.save` takes.
        path: of the file; symbolic links are followed. A new file's mode follows the umask. A file that is replaced
            keeps its mode, and its owner if this user may set it. A .pt file has no checksums after
            ``torch.serialization.set_crc32_options(False)``.
        options: of the engine.

    Raises:
        ValueError: the safetensors format cannot say it; the message has what and where.
        RuntimeError: the .pt format cannot: memory is shared by tensors of different dtypes.
        FileNotFoundError: the folder of ``path`` does not exist.
        NotReplaceable: an `IoError`. No new file can replace ``path``: it is a bind-mounted file, or its folder is not
            writable. `torch.save` may still write over it in place, which a crash meanwhile leaves damaged.
        IoError: the file cannot be written, or space is lacking.
        pickle.PicklingError, TypeError, AttributeError: something in it cannot be pickled; the message has its name.
    """
    path = checked_path(path, "save")
    save_file = safetensors_file.save if path.endswith(".safetensors") else archive_writer.save
    started = time.perf_counter()
    get_ready(options or EngineOptions())
    save_file(value, path, options or EngineOptions())
    note_checkpoint_stall(time.perf_counter() - started)


@collector_paused()
def load(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    only: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    into: Any = None,
    strict: bool = True,
    verify: bool = False,
    weights_only: bool = True,
    options: EngineOptions | None = None,
) -> Any:
    """Read a checkpoint: a file of `torch.save`'s, a safetensors file, or many of those with their ``*.index.json``.

        model.load_state_dict(gdsdata.load("model.pt", device="cuda"))
        gdsdata.load("model.safetensors", into=model.state_dict())

    A model that was made on the "meta" device has no memory to fill; it takes the loaded tensors themselves:

        model.load_state_dict(gdsdata.load("model.safetensors", device="cuda"), assign=True)

    The file is opened once: if its name is replaced meanwhile (by a rename, as `save` does), all of what was opened is
    read. Of an index and its shards, up to an eighth of the process's limit of descriptors are opened at first.

    Bytes go straight into the tensors; beside them it takes the engine's own memory (see `EngineOptions`). Tensors that
    shared memory when they were saved by torch share it again, but for those that ``into`` holds.

    Tensors have names: the keys on the way to them, joined by dots ("optimizer.state.0.exp_avg").

    Args:
        path: of the file.
        device: where tensors are made, whatever device they were saved from. Not used with ``into``.
        only: shell patterns ("layers.0.*"): what no name matches is left out. It is not read either, if tensors hold
            all data of the file: other objects, and tensors that are not plain (sparse, quantized), need all of it.
        dtype: of the floating-point tensors of the result; None: as they were saved. They are cast on the device.
        into: a nest of dicts, lists and tuples, as ``state_dict()`` gives it. Its tensors are filled where they are
            (views, and on several devices, too); its other values are replaced in their dict or list. A tensor that is
            not plain takes the copy of another one of its type, or is refused before anything is changed.
        strict: with ``into``: every name there is in the file, and every one of the file there. False: those in both.
        verify: compare checksums on the way in. Records of torch's files have one, and safetensors files of gdsdata's.
        weights_only: torch's rules for what a pickle may make (`torch.load`).
        options: of the engine.

    Returns:
        What was saved (of safetensors: a dict), or ``into``. Its bytes are in place, for every stream.

    Raises:
        FileNotFoundError, IoError: the file is not to be had, or is a folder.
        CorruptData: it is damaged (with ``verify``, the message has the tensor's name), none of these formats, or was
            changed in place meanwhile.
        ValueError: ``only`` matches no name; ``into`` has other names, shapes or (with no ``dtype``) dtypes,
            or tensors on the meta device.
        TypeError: an argument is of another type: ``path`` of several files, or a module as ``into``.
        pickle.UnpicklingError: something in it is not allowed with ``weights_only``.
        RuntimeError, AttributeError, ...: what `torch.load` raises besides, with the path.
    """
    path = checked_path(path, "load")
    if isinstance(only, str):
        raise ValueError(f"only={only!r}: give a list of patterns, as only=[{only!r}]")
    if into is not None:
        _check_into(path, into)
    target = engine.resolved(device)
    make_reading = functools.partial(Reading, options or EngineOptions(), verify)
    reading = make_reading()
    file = OpenFile(path)
    kind = _kind_of(file)
    if kind != "index":
        reading.expect(file.size_bytes, target if into is None else _first_device(into))
    if kind == "torch" and only is None and into is None and dtype is None:
        return _load_torch(file, reading, target, weights_only)

    def matches(place: Path) -> bool:
        return only is None or any(fnmatch.fnmatchcase(name_of(place), pattern) for pattern in only)

    made_on = target if into is None else torch.device("cpu")
    saved, stored_of = _structure(kind, file, made_on, make_reading, weights_only)
    chosen = saved if only is None else mapped(saved, lambda place, leaf: leaf if matches(place) else LEFT_OUT)
    if chosen is LEFT_OUT:
        if only:
            there = _some({place.path for place in places(saved)})
            raise ValueError(f"only={list(only)!r} matches no name in '{path}'. Give patterns of these: {there}")
        chosen = {}
    if into is None:
        return _make(mapped(chosen, stored_of), reading, target, dtype)
    leaves = {place.path: place.leaf for place in places(chosen)}
    targets = [place for place in places(into) if matches(place.path)]
    if strict:
        _check_names(path, {place.path for place in targets}, set(leaves))
    found = [(place, stored_of(place.path, leaves[place.path])) for place in targets if place.path in leaves]
    for place, leaf in found:  # all, before the first is changed
        if isinstance(place.leaf, torch.Tensor) or isinstance(leaf, (Stored, torch.Tensor)):
            _check_fits(path, place.path, place.leaf, leaf, dtype)
    for place, leaf in found:
        if isinstance(place.leaf, torch.Tensor):
            _fill_tensor(place.leaf, leaf, name_of(place.path), reading)
        else:
            reading.afterwards(functools.partial(place.replace, leaf))
    reading.run()
    return into


@collector_paused()
def load_over(
    path: str,
    targets: dict[str, Any],
    *,
    strict: Sequence[str],
    verify: bool,
    weights_only: bool,
    options: EngineOptions,
) -> dict[str, Any]:
    """What a file of torch's has under each name of ``targets``, in the memory of their tensors where it fits.

    A tensor of the same path, shape and dtype as a target's is read into that one, others into new ones, on a device of
    the kind that they were saved from. One that has no memory of its own is copied, or takes the target's place.

    Args:
        strict: names under which all paths must be the same, and tensors fit.

    Raises:
        ValueError: a name is not in the file, or something of ``strict`` differs.
    """
    _check_on_a_device(path, targets)
    file = OpenFile(path)
    if _kind_of(file) != "torch":
        raise CorruptData(f"'{path}' is a safetensors file, and no checkpoint of AsyncCheckpointer's", path)
    try:
        saved = unpickle_structure(open_archive(file))
    except NotPlain:
        saved = None
    if saved is None:  # torch has to make it
        saved = load(path, verify=verify, weights_only=weights_only, options=options)
    lost = [name for name in targets if not isinstance(saved, dict) or name not in saved]
    if lost:
        raise ValueError(f"'{path}' has nothing of the name {lost[0]!r}")
    chosen = {name: saved[name] for name in targets}
    there = {place.path: place.leaf for place in places(targets)}
    for name in strict:
        found = {place.path: place.leaf for place in places(chosen) if place.path[0] == name}
        _check_names(path, {one for one in there if one[0] == name}, set(found))
        for one, leaf in found.items():
            is_tensor = isinstance(leaf, (Stored, torch.Tensor)) or isinstance(there[one], torch.Tensor)
            if is_tensor and not are_of_one_kind(there[one], leaf):
                _check_fits(path, one, there[one], leaf)
    reading = Reading(options, verify)
    reading.expect(file.size_bytes, _first_device(targets))
    new: dict[torch.device, dict[Path, Stored]] = {}
    for place in places(chosen):
        target = there.get(place.path)
        if not isinstance(place.leaf, (Stored, torch.Tensor)):
            continue
        if _fits(target, place.leaf):
            _fill_tensor(target, place.leaf, name_of(place.path), reading)
        elif isinstance(place.leaf, Stored):
            new.setdefault(_like(place.leaf.location), {})[place.path] = place.leaf
    made = {path: tensor for device in new for path, tensor in reading.tensors(new[device], device).items()}
    reading.run()

    def in_its_place(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, (Stored, torch.Tensor)) and _fits(there.get(path), leaf):
            return there[path]
        if path[0] in strict and are_of_one_kind(there.get(path), leaf):
            return leaf.to(there[path].device)
        return made.get(path, leaf)

    return mapped(chosen, in_its_place)


def _check_into(path: str, into: Any) -> None:
    if isinstance(into, torch.nn.Module):
        raise TypeError(
            f"into= is a module ({type(into).__name__}): pass its tensors, into=model.state_dict(), or call "
            f"model.load_state_dict(gdsdata.load({path!r}))"
        )
    if not isinstance(into, (dict, list, tuple, torch.Tensor)):
        remedy = "pass a nest of dicts and lists with tensors in it, as state_dict() gives it"
        raise TypeError(f"into= is of type {type(into).__name__}, which has nothing to fill: {remedy}")
    _check_on_a_device(path, into)


def _check_on_a_device(path: str, nest: Any) -> None:
    for place in places(nest):
        if isinstance(place.leaf, torch.Tensor) and place.leaf.is_meta:
            name = name_of(place.path) or "the tensor"
            raise ValueError(
                f"{name} is on the meta device, which has no memory to fill from '{path}': call "
                f"model.load_state_dict(gdsdata.load({path!r}, device=...), assign=True), which gives the model the "
                "loaded tensors, or model.to_empty(device=...) before"
            )


def _first_device(nest: Any) -> torch.device:
    """Of its tensors."""
    tensors = (place.leaf for place in places(nest) if isinstance(place.leaf, torch.Tensor))
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device


def _like(location: str) -> torch.device:
    on_gpu = location.startswith("cuda") and torch.cuda.is_available()
    return engine.resolved("cuda") if on_gpu else torch.device("cpu")


def _kind_of(file: OpenFile) -> str:
    """One of "torch", "safetensors" and "index".

    Raises:
        CorruptData: it is none of them.
    """
    if file.size_bytes == 0:
        raise empty_file(file.path)
    if file.path.endswith(".json"):
        return "index"
    head = file.read(0, _HEAD_BYTES)
    if safetensors_header.recognises(head):
        return "safetensors"
    if file.path.endswith(".safetensors"):
        found = foreign_file(f"'{file.path}'", head)
        words = f"'{file.path}' does not begin as a safetensors file: it is another one, or damaged. Fetch it again"
        raise CorruptData(words if found is None else str(found), file.path, 0, len(head))
    return "torch"  # or an older file of torch's, which torch itself recognises


# ------------------------------------------------------------------------------------------------ files of torch's


def _load_torch(file: OpenFile, reading: Reading, device: torch.device, weights_only: bool) -> Any:
    try:
        archive = open_archive(file)
        devices = [device] * len(archive.storages)
    except NotPlain as why:
        return _read_by_torch(file, why, device, weights_only)
    return archive_reader.read(archive, reading, devices, device, weights_only, _errors_of_torch(file, weights_only))


# Torch looks into small tensors while it builds some kinds (sizes of nested ones): they are zeros then, and no garbage.
_READ_WHILE_BUILT_BYTES = 1 << 20


def _structure(
    kind: str, file: OpenFile, device: torch.device, make_reading: Callable[[], Reading], weights_only: bool
) -> tuple[Any, Callable[[Path, Any], Any]]:
    """What was saved, and what makes of a leaf that stands for a tensor a `Stored`.

    Args:
        device: of what has to be made to find that out.
        make_reading: called if all of the file has to be read.
    """
    if kind == "torch":
        return _structure_of_torch(file, device, make_reading, weights_only)
    read = safetensors_file.read_index if kind == "index" else safetensors_file.read_header
    return read(file), _as_it_is


def _as_it_is(place: Path, leaf: Any) -> Any:
    return leaf


def _structure_of_torch(
    file: OpenFile, device: torch.device, make_reading: Callable[[], Reading], weights_only: bool
) -> tuple[Any, Callable[[Path, Any], Any]]:
    """Tensors have no values yet, but where all of the file had to be read."""
    try:
        archive = open_archive(file)
        if (structure := unpickle_structure(archive)) is not None:
            return structure, _as_it_is
        devices = [device] * len(archive.storages)
    except NotPlain as why:
        return _read_by_torch(file, why, device, weights_only), _as_it_is
    found = _structure_without_values(file, archive, weights_only)
    if found is None:
        within = _errors_of_torch(file, weights_only)
        return archive_reader.read(archive, make_reading(), devices, device, weights_only, within), _as_it_is
    return found


def _structure_without_values(
    file: OpenFile, archive: Archive, weights_only: bool
) -> tuple[Any, Callable[[Path, Any], Any]] | None:
    """None if plain tensors, as leaves, are not all that refers to a storage: what else does needs its values."""
    # Memory that is not touched costs nothing.
    storages = [torch.UntypedStorage(saved.size_bytes) for saved in archive.storages]
    for storage in storages:
        if storage.nbytes() < _READ_WHILE_BUILT_BYTES:
            storage.fill_(0)
    records = {
        storage_id(storage): archive.record_of(saved) for storage, saved in zip(storages, archive.storages, strict=True)
    }
    try:
        saved = archive_reader.unpickle(archive, storages, weights_only)
    except (pickle.UnpicklingError, CorruptData):
        with _errors_of_torch(file, weights_only):
            raise
    except Exception:  # if it was not for lack of values, the same comes once more when they are there
        return None
    tensors = {id(place.leaf): place.leaf for place in places(saved) if isinstance(place.leaf, torch.Tensor)}
    if len(tensors) != archive.references.count or not all(map(is_plain, tensors.values())):
        return None

    def stored(place: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        offset = leaf.storage_offset() * leaf.element_size()
        made_of = storage_id(leaf.untyped_storage())
        return Stored(records[made_of], offset, leaf.dtype, tuple(leaf.shape), leaf.stride())

    return saved, stored


def _read_by_torch(file: OpenFile, why: NotPlain, device: torch.device, weights_only: bool) -> Any:
    with _errors_of_torch(file, weights_only), file.reader() as reader:
        found = torch.load(reader, map_location=device, weights_only=weights_only)
    engine.warn_once(f"'{os.path.basename(file.path)}' is read by torch.load: {why}")
    return found


def _errors_of_torch(file: OpenFile, weights_only: bool) -> AbstractContextManager[None]:
    place, head = f"'{file.path}' of {file.size_bytes} bytes", file.read(0, _HEAD_BYTES)
    return torch_errors_explained(file.path, place, file.size_bytes, head=head, weights_only=weights_only)


# ------------------------------------------------------------------------------------------------ what was asked for


def _make(chosen: Any, reading: Reading, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The same nest, each `Stored` read into a tensor."""
    stored = {place.path: place.leaf for place in places(chosen) if isinstance(place.leaf, Stored)}
    tensors = reading.tensors(stored, device)
    reading.run()

    def made(place: Path, leaf: Any) -> Any:
        tensor = tensors.get(place, leaf)
        is_cast = dtype is not None and isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        return tensor.to(dtype) if is_cast else tensor

    return mapped(chosen, made)


def _fill_tensor(target: torch.Tensor, leaf: Stored | torch.Tensor, name: str, reading: Reading) -> None:
    if isinstance(leaf, Stored):
        return reading.tensor_into(target, leaf, name)
    return reading.afterwards(functools.partial(copy_into, target, leaf))


def _fits(target: Any, leaf: Stored | torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    if not isinstance(target, torch.Tensor):
        return False
    if not has_own_memory(target) or not (isinstance(leaf, Stored) or has_own_memory(leaf)):
        return are_of_one_kind(target, leaf) and takes_copy_of(target, leaf)
    return target.shape == leaf.shape and target.dtype in (leaf.dtype, dtype)  # torch.Size is a tuple


def _check_fits(path: str, place: Path, target: Any, leaf: Any, dtype: torch.dtype | None = None) -> None:
    if isinstance(target, torch.Tensor) != isinstance(leaf, (Stored, torch.Tensor)):
        raise ValueError(f"{name_of(place)} is a tensor in one of '{path}' and into, and none in the other")
    if _fits(target, leaf, dtype):
        return
    if not has_own_memory(target) or not (isinstance(leaf, Stored) or has_own_memory(leaf)):
        raise ValueError(
            f"{name_of(place)} in '{path}' is {_described(leaf)}, and the tensor to fill is {_described(target)}: "
            "one cannot be copied into the other; load it without into="
        )
    raise ValueError(
        f"{name_of(place)} in '{path}' has shape {tuple(leaf.shape)} and dtype {leaf.dtype}, and the tensor to "
        f"fill {tuple(target.shape)} and {target.dtype} (dtype= allows a cast to it)"
    )


def _described(one: Stored | torch.Tensor) -> str:
    kind = "plain Tensor" if isinstance(one, Stored) or is_plain(one) else type(one).__name__
    if isinstance(one, Stored):
        return f"a {kind} of {one.dtype}"
    return f"a {kind} of {one.dtype} and {one.layout} on {one.device}"


def _check_names(path: str, asked: set[Path], there: set[Path]) -> None:
    if asked != there:
        raise ValueError(
            f"'{path}' and into have different names (strict=False takes those in both): {_some(asked - there)} "
            f"only in into, {_some(there - asked)} only in the file"
        )


def _some(leaves: set[Path]) -> str:
    shown = ", ".join(sorted(map(name_of, leaves))[:5]) or "none"
    return shown + (f" and {len(leaves) - 5} more" if len(leaves) > 5 else "")
