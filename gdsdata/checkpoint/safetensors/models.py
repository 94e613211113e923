"""`save_model` and `load_model`, as `safetensors.torch` has them: tensors that share memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import torch

from gdsdata.checkpoint.safetensors.files import load_file, save_file
from gdsdata.checkpoint.safetensors.opened import Device


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Write a model's state, as `safetensors.torch.save_model`.

    If names share memory, as tied weights do, one of them is saved. The metadata has the others,
    each with the saved name. `load_model` fills the tied weights of its model.

    Args:
        model: its ``state_dict()`` is saved.
        filename: of the file, or the URL of an object.
        metadata: strings by name, for the header. The dict gets the names that are left out.
        force_contiguous: save contiguous copies of tensors that are not. False: they are an error.

    Raises:
        RuntimeError: names share memory, and none of them has all of it.
        ValueError, SafetensorError: see `save_file`.

    Stream semantics: as `save_file`.
    """
    state = model.state_dict()
    for kept, others in _shared_names(state).items():
        metadata = {} if metadata is None else metadata
        for name in others:
            metadata.setdefault(name, kept)
            del state[name]
    tensors = {name: tensor.contiguous() if force_contiguous else tensor for name, tensor in state.items()}
    try:
        save_file(tensors, filename, metadata=metadata)
    except ValueError as error:
        raise ValueError(f"{error} Or use save_model(..., force_contiguous=True).") from error


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: Device = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Read a file of `save_model` into a model, as `safetensors.torch.load_model`.

    Args:
        model: to fill; its tied weights stay tied.
        filename: of the file, or the URL of an object.
        strict: require that model and file have the same names.
        device: to which the tensors are read before they are copied into the model.
        backend: "mmap" or "pread", which make no difference.

    Returns:
        The names of the model that the file does not have, and those of the file that the model
        does not have.

    Raises:
        RuntimeError: with ``strict``, names differ; or shapes differ.
        FileNotFoundError, SafetensorError, IoError: see `safe_open`.
    """
    state = load_file(filename, device=device, backend=backend)
    shared = _shared_names(model.state_dict(), preferred=state.keys())
    found = model.load_state_dict(state, strict=False)
    missing, unexpected = set(found.missing_keys), list(found.unexpected_keys)
    for name in (name for others in shared.values() for name in others):
        if name in missing:
            missing.remove(name)
        else:  # the file has it too, though it is another name of what it has already
            unexpected.append(name)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                quoted = ", ".join(f'"{name}"' for name in sorted(names))
                lines.append(f"    {what} key(s) in state_dict: {quoted}")
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def _shared_names(state: Mapping[str, torch.Tensor], preferred: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the names to leave out, by the name of the tensor that has their memory.

    Args:
        state: tensors by name.
        preferred: keep one of these, if it has all of the memory.

    Raises:
        RuntimeError: a tensor has only a part of its storage, and no other name has all of it.
    """
    others: dict[str, list[str]] = {}
    for names in _overlapping(state):
        whole = sorted(name for name in names if _is_whole(state[name]))
        if not whole:
            raise RuntimeError(
                f"none of {sorted(names)} has all of the memory that it is a part of, so the file would have parts "
                "that overlap, or more bytes than the model uses: replace each by its clone()"
            )
        kept = next((name for name in whole if name in preferred), whole[0])
        if len(names) > 1:
            others.setdefault(kept, []).extend(name for name in sorted(names) if name != kept)
    return others


def _overlapping(state: Mapping[str, torch.Tensor]) -> Iterator[set[str]]:
    """Yield sets of names whose tensors share memory, directly or through others of the set."""
    of_storage: dict[tuple[torch.device, int, int], list[str]] = defaultdict(list)
    for name, tensor in state.items():
        if not tensor.is_meta and tensor.untyped_storage().nbytes() > 0:
            storage = tensor.untyped_storage()
            of_storage[tensor.device, storage.data_ptr(), storage.nbytes()].append(name)
    for names in of_storage.values():
        areas = sorted((state[name].data_ptr(), _end(state[name]), name) for name in names)
        group, end = {areas[0][2]}, areas[0][1]
        for first, last, name in areas[1:]:
            if first >= end:
                yield group
                group = set()
            group.add(name)
            end = max(end, last)
        yield group


def _end(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return tensor.data_ptr()
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (steps + 1) * tensor.element_size()


def _is_whole(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return tensor.data_ptr() == storage.data_ptr() and tensor.nbytes == storage.nbytes()
