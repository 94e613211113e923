"""The weights of a model: the tensors of its safetensors files, one by one, read in batches."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from gdsdata.checkpoint.open_object import open_path
from gdsdata.checkpoint.safetensors.numbered_names import by_numbers
from gdsdata.checkpoint.safetensors_file import read_headers, read_indexed, weight_map
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.urls import is_url, joined, plain_path, store_and_key
from gdsdata.io.options import EngineOptions, options_of
from gdsdata.storage.store import ObjectInfo

INDEX_NAME = "model.safetensors.index.json"

# A batch costs a round trip of object stores, and less than a millisecond of Python.
_BATCH_BYTES = 256 << 20
# While a batch is taken, so many others are read.
_BATCHES_AHEAD = 2

Weight = tuple[str, Stored]


def find_weights(folder: str, patterns: Sequence[str] | None = None) -> tuple[list[str], str | None]:
    """Return the files of a model's weights, and their index.

    Args:
        folder: a path, or the URL of a folder of objects.
        patterns: of names, as ``["model-*.safetensors"]``. The first that fits a safetensors file
            in the folder chooses the files. None: the index does.

    Returns:
        The paths or URLs of the files that ``model.safetensors.index.json`` names, and that of the
        index. Without an index: all safetensors files in the folder, and None. With ``patterns``:
        the files that fit, and None.

    Raises:
        FileNotFoundError: there are none.
        CorruptData: the index is damaged.
        IoError, PermissionError: the folder cannot be read.
    """
    folder = plain_path(folder)
    if patterns is not None:
        return [_beside(folder, name) for name in _fitting(folder, patterns)], None
    index = _beside(folder, INDEX_NAME)
    try:
        names = set(weight_map(open_path(index)).values())
    except FileNotFoundError:
        names = _safetensors_in(folder)
        if not names:
            raise FileNotFoundError(
                f"'{folder}' has no {INDEX_NAME} and no safetensors files: give the folder of a model's weights"
            ) from None
        return [_beside(folder, name) for name in names], None
    return [_beside(folder, name) for name in names], index


def open_weights(files: Sequence[str], index: str | None = None) -> list[Weight]:
    """Open files, and return the names and places of their tensors.

    They come by the numbers in the files' names, and in a file by their names. That is the order of
    `safetensors`, which models rely on.

    Args:
        files: paths or URLs.
        index: a ``*.index.json`` to compare the files with; None: there is none.

    Raises:
        CorruptData: a file or the index is damaged, or a file does not have a tensor that the index
            says it has.
        FileNotFoundError: a file is missing that ``files`` or ``index`` names.
        IoError, PermissionError: a file cannot be read.
    """
    ordered = sorted(files, key=lambda path: (by_numbers(os.path.basename(path)), path))
    if index is None:
        headers = read_headers(ordered)
    else:
        headers = list(read_indexed(index, weight_map(open_path(index)), ordered).values())
    return [(name, header[name]) for header in headers for name in sorted(header)]


def iterate_weights(
    weights: Sequence[Weight],
    device: torch.device,
    *,
    wants: Callable[[str], bool] | None = None,
    group: object = None,
    once: str | None = None,
    batch_bytes: int = _BATCH_BYTES,
    options: EngineOptions | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors, in the order of ``weights``.

    The bytes go straight to the device, in batches. Three batches are in memory at most, besides
    the tensors that the caller holds. The caller may hold any of them: their memory is not used
    again.

    With ``group``, each byte is read by one rank, and passed on. All ranks of the group iterate to
    the end, over the same weights. They may want different ones.

    Args:
        weights: of `open_weights`.
        device: of the tensors, with its index.
        wants: called with a name. False: the tensor is not read, nor yielded. None: all are.
        group: see `gdsdata.load`.
        once: see `gdsdata.load`.
        batch_bytes: the size of a batch; a longer tensor is a batch of its own. With ``group``, a
            batch has three times as much, and only one is in memory. Each rank needs up to 128 MiB
            more on the CPU and on the GPU, for tensors below 1 MiB.
        options: of the engine; None: the defaults.

    Raises:
        CorruptData: a file was changed since it was opened, or is cut. With ``group``: ranks see
            different versions of it.
        IoError, StallError: a file cannot be read.
        ValueError: ``group`` or ``once`` is wrong, or its ranks iterate over different weights.
        RankLost: as of `gdsdata.load`. A rank that ends before the others is silent.

    Stream semantics: the bytes of a tensor are in place when it is yielded, for every stream.
    """
    from gdsdata.collective.agreement import group_of  # late: most programs read by themselves

    options = options_of(options)
    chosen = wants or _everything
    if group_of(group) is None:
        return _alone(list(_batches(weights, batch_bytes)), device, chosen, options)
    batches = list(_batches(weights, batch_bytes * (1 + _BATCHES_AHEAD)))
    return _together(batches, device, chosen, group, once, options)


def _alone(
    batches: Sequence[Sequence[Weight]], device: torch.device, wants: Callable[[str], bool], options: EngineOptions
) -> Iterator[tuple[str, torch.Tensor]]:
    ahead: deque[_Batch] = deque()
    try:
        for weights in batches:
            ahead.append(_Batch(weights, device, wants, TensorReader(options, verify=False)))
            ahead[-1].reader.begin()
            if len(ahead) > _BATCHES_AHEAD:
                yield from _read(ahead)
        while ahead:
            yield from _read(ahead)
    finally:
        for batch in ahead:  # the caller has ended early
            batch.reader.cancel()


def _read(ahead: deque[_Batch]) -> Iterator[tuple[str, torch.Tensor]]:
    ahead[0].reader.run()
    return ahead.popleft().taken()


def _together(
    batches: Sequence[Sequence[Weight]],
    device: torch.device,
    wants: Callable[[str], bool],
    group: object,
    once: str | None,
    options: EngineOptions,
) -> Iterator[tuple[str, torch.Tensor]]:
    from gdsdata.collective.transfers import reads_together  # late: see `iterate_weights`

    for number, weights in enumerate(batches):
        about = f"{len(weights)} tensors from {weights[0][0]!r} on"
        call = {"call": "iterate_weights", "batch": number, "of": len(batches), "with": about}
        # Nothing of it is open while the caller has a tensor: it may use the group, or fail.
        with reads_together(group, once, call, options.stall_timeout_s) as together:
            batch = _Batch(weights, device, wants, TensorReader(options, verify=False, together=together))
            batch.reader.run()
        yield from batch.taken()
        del batch  # before the next one is made


class _Batch:
    """Tensors that are read in one go."""

    def __init__(
        self, weights: Sequence[Weight], device: torch.device, wants: Callable[[str], bool], reader: TensorReader
    ) -> None:
        chosen = {(name,): stored for name, stored in weights if wants(name)}
        self.reader = reader
        self._made = reader.tensors(dict(chosen), device)
        self._names = [name for (name,) in chosen]

    def taken(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor without holding it."""
        for name in self._names:
            yield name, self._made.pop((name,))


def _batches(weights: Sequence[Weight], batch_bytes: int) -> Iterator[list[Weight]]:
    """Yield batches of about a size. A name occurs in one once."""
    batch: list[Weight] = []
    names: set[str] = set()
    size_bytes = 0
    for name, stored in weights:
        if batch and (size_bytes + stored.size_bytes > batch_bytes or name in names):
            yield batch
            batch, names, size_bytes = [], set(), 0
        batch.append((name, stored))
        names.add(name)
        size_bytes += stored.size_bytes
    if batch:
        yield batch


def _everything(name: str) -> bool:
    return True


def _beside(folder: str, name: str) -> str:
    return joined(folder, name) if is_url(folder) else os.path.join(folder, name)


def _fitting(folder: str, patterns: Sequence[str]) -> list[str]:
    names = _safetensors_in(folder)
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if found:
            return found
    raise FileNotFoundError(
        f"'{folder}' has no safetensors files that fit {list(patterns)!r:.200}: give the folder of this model's weights"
    )


def _safetensors_in(folder: str) -> set[str]:
    return {name for name in _names_in(folder) if name.endswith(".safetensors")}


def _names_in(folder: str) -> list[str]:
    if not is_url(folder):
        return os.listdir(folder)
    store, prefix = store_and_key(joined(folder, ""))
    return [os.path.basename(one.url) for one in store.list(prefix, "/") if isinstance(one, ObjectInfo)]
