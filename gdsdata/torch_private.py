"""Every private part of torch that gdsdata uses, in one place.

No other file names one (`tests/test_structure.py`).

They were checked with the versions in `CHECKED` (`make torch-versions`). If this torch is newer,
the first use of a part that may have changed its meaning warns, once. Importing this module never
warns.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from gdsdata.warn import warn

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup, Work
    from torch.distributed.checkpoint import DefaultSavePlanner

CHECKED = ((2, 9), (2, 15))  # the oldest and the newest version: major, minor


@functools.cache
def warn_if_newer() -> None:
    """Warn, once, if this torch is newer than those that were checked."""
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) > CHECKED[1]:
        oldest, newest = (".".join(map(str, version)) for version in CHECKED)
        warn(
            f"gdsdata was checked with torch {oldest} to {newest}, and this is torch {torch.__version__}. Checkpoints "
            "use private parts of torch, which may have changed: verify a saved file by torch.load, or update gdsdata"
        )


# --- loaders ----------------------------------------------------------------------------------------------------------

FETCHERS = "torch.utils.data._utils.fetch"  # the module of the objects that take batches from a data set


# --- tensors and storages ---------------------------------------------------------------------------------------------

# The first three are called for every tensor of a state, so they have no Python frame of their own.

# Returns a number that two storage objects share if they are the same storage.
storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")

# Returns whether a tensor is zeros without memory, as automatic differentiation makes them.
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor

# Returns the tensor's backward hooks; something false if there are none.
backward_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")


def shared_memory(size_bytes: int) -> torch.UntypedStorage:
    """Return zeros in memory that this process shares with those that it forks, or spawns with it.

    `torch.Tensor.share_memory_`, which is public, copies a tensor there. A new process takes 0.8 ms
    for that, and 0.2 for this (two cores, 2026-11-27).

    If the system has no place for it (`/dev/shm` is missing, read-only or full, or RLIMIT_FSIZE is
    small), a mapping without a name serves. Forks share it. If it is pickled for a process that is
    spawned, torch raises its error, as it does for the batches of a DataLoader.
    """
    try:
        return torch.UntypedStorage._new_shared(size_bytes)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8).untyped_storage()


def renew_sharing_lock() -> None:
    """Give a forked child a lock of its own for putting tensors into shared memory.

    Another thread of the parent may have held it at the fork. The child has no such thread, so
    nothing is being shared there.
    """
    if hasattr(torch.storage, "_share_memory_lock"):
        torch.storage._share_memory_lock = threading.Lock()
        torch.storage._share_memory_map.clear()


def parts_of_typed_storage(storage: torch.TypedStorage) -> tuple[torch.UntypedStorage, int, str]:
    """Return a typed storage's parts.

    They are the untyped storage, the number of elements, and the name in ``torch`` of its class in
    pickles.

    Raises:
        TypeError: pickles have no name for its dtype (uint4 and the like), which torch reports by a
            KeyError.
    """
    try:
        name = storage._pickle_storage_type()  # type: ignore[no-untyped-call]
    except KeyError:
        raise TypeError(
            f".pt files cannot have tensors of {storage.dtype}: save the bytes, tensor.view(torch.uint8)"
        ) from None
    return storage._untyped_storage, storage._size(), name  # type: ignore[no-untyped-call]


def retyped_storage(storage: torch.TypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage of that dtype in the memory of another one."""
    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage._untyped_storage, dtype=dtype, _internal=True
    )


# --- pickles of torch.save --------------------------------------------------------------------------------------------

# The functions that a pickle names for tensors, as (module, name). Files name them, so torch cannot
# rename them.
REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v2")  # storage, offset, shape, strides, requires_grad, hooks
REBUILD_TENSOR_OF_NEWER_DTYPE = ("torch._utils", "_rebuild_tensor_v3")  # the same, and the dtype
REBUILD_PARAMETER = ("torch._utils", "_rebuild_parameter")  # data, requires_grad, hooks
# These check values of the tensors that they are given, which therefore must have been read before.
REBUILDERS_THAT_LOOK_AT_VALUES = frozenset({"_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor"})

rebuild_tensor: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor_v2  # what `REBUILD_TENSOR` names


@functools.cache
def storage_types() -> Mapping[torch.dtype, str]:
    """Return the names in ``torch`` of the storage classes of pickles, by dtype.

    Newer dtypes have none.
    """
    warn_if_newer()
    return torch.storage._dtype_to_storage_type_map()


# --- torch.save and torch.load ----------------------------------------------------------------------------------------

# The functions of `torch.serialization` that torch.save and torch.load look up whenever they are
# called, whatever names a program has for those two. Their arguments:
OPEN_ZIP_WRITER = "_open_zipfile_writer"  # (path or file object) -> context manager of the writer
SAVE_ZIP = "_save"  # (object, writer, pickle module, pickle protocol, without byte order)
SAVE_LEGACY = "_legacy_save"  # (object, file object, pickle module, pickle protocol)
OPEN_ZIP_READER = "_open_zipfile_reader"  # (open file) -> context manager of the reader
LOAD_ZIP = "_load"  # (reader, map_location, pickle module, record, mapped file, ...)
LOAD_LEGACY = "_legacy_load"  # (open file, map_location, pickle module, ...)
SAVE_SEAMS = (OPEN_ZIP_WRITER, SAVE_ZIP, SAVE_LEGACY)
LOAD_SEAMS = (OPEN_ZIP_READER, LOAD_ZIP, LOAD_LEGACY)
PICKLE_RECORD = "data.pkl"  # the default of `LOAD_ZIP`


def serialization_seams() -> Mapping[str, Callable[..., Any]]:
    """Return the functions of `SAVE_SEAMS` and `LOAD_SEAMS` by name, as far as torch has them."""
    names = (*SAVE_SEAMS, *LOAD_SEAMS)
    return {name: getattr(torch.serialization, name) for name in names if hasattr(torch.serialization, name)}


def weights_only_pickle_module() -> ModuleType:
    """Return the pickle module that `LOAD_ZIP` gets for ``weights_only=True``."""
    from torch import _weights_only_unpickler

    return _weights_only_unpickler


# Moves a storage to where torch.load puts it without a ``map_location``. Public, but not typed.
restored: Callable[[torch.UntypedStorage, str], torch.UntypedStorage] = torch.serialization.default_restore_location


def check_is_storage(storage: object, dtype: torch.dtype) -> None:
    """Raise what torch.load raises if a ``map_location`` function returns no storage."""
    torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def moves_no_values() -> bool:
    """Return whether torch.save and torch.load are set to move no values.

    They are within ``skip_data``, and for fake tensors.
    """
    warn_if_newer()
    detect_fake_mode: Callable[[Iterable[Any] | None], Any] = torch._guards.detect_fake_mode
    return torch.serialization._serialization_tls.skip_data or detect_fake_mode(None) is not None


def makes_fake_tensors() -> bool:
    """Return whether new tensors are fake ones, which have no memory: within `FakeTensorMode`.

    A compilation notes such a mode too (`moves_no_values`), and its backend makes real tensors.
    """
    active_fake_mode: Callable[[], Any] = torch._guards.active_fake_mode
    return active_fake_mode() is not None


@contextlib.contextmanager
def map_location_restored() -> Iterator[None]:
    """For ``with``: undo what torch.load notes of its ``map_location`` for tensor subclasses.

    After an error, torch would keep it, and all storages that it refers to.
    """
    noted = torch.serialization._serialization_tls
    before = noted.map_location
    try:
        yield
    finally:
        noted.map_location = before


# These are called for every batch, so they have no Python frame of their own.

# Returns the handle of the current stream of the GPU of that index in this thread, without a
# `torch.cuda.Stream`. A torch without CUDA lacks it.
current_stream_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)

# Returns whether torch's profiler is recording in this thread.
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def dcp_storage_utils() -> ModuleType:
    """Return the module in which DCP looks up its default storage classes."""
    warn_if_newer()
    from torch.distributed.checkpoint import _storage_utils

    return _storage_utils


def dcp_async_executors() -> tuple[Any, Any]:
    """Return the classes whose `execute_save` begins an `async_save`: in a process, in a thread."""
    from torch.distributed.checkpoint._async_process_executor import _ProcessBasedAsyncCheckpointExecutor
    from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor

    return _ProcessBasedAsyncCheckpointExecutor, _ThreadBasedAsyncCheckpointExecutor


def saves_in_process(executor: type) -> bool:
    """Return whether a class of `dcp_async_executors` saves in a process of its own."""
    return executor is dcp_async_executors()[0]


def dcp_storage_info() -> type:
    """Return the class whose objects say where an item lies in a DCP checkpoint.

    Its attributes are relative_path, offset and length.

    ``.metadata`` is a pickle of them, so torch cannot rename it.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def caches_plans(planner: DefaultSavePlanner) -> bool:
    """Return whether the planner keeps its plan from one save to the next."""
    return planner._enable_plan_caching


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that an optimizer's first step would create.

    Parameters do not change.
    """
    warn_if_newer()
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(optimizer)


# --- torch.distributed ------------------------------------------------------------------------------------------------

# Copies each tensor of the second list into that of the first list: few kernels on a GPU.
copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_


def timeout_of_group(group: ProcessGroup) -> timedelta:
    """Return how long a collective of a process group may take."""
    warn_if_newer()
    return min(group._get_backend(device).options._timeout for device in group._device_types)


def begin_broadcasts(memories: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup) -> list[Work]:
    """Begin to give tensors of single ranks to all ranks of a group, in one kernel over NCCL.

    Args:
        memories: each tensor, and the rank of the group whose bytes it gets; all on one device.
        group: all its ranks make this call, with the same ranks and sizes.

    Returns:
        What to wait for.
    """
    device = memories[0][0].device

    def begin() -> list[Work | None]:
        return [
            torch.distributed.broadcast(memory, group=group, group_src=rank, async_op=True) for memory, rank in memories
        ]

    if not getattr(group._get_backend(device), "supports_coalescing", False):
        return [work for work in begin() if work is not None]
    warn_if_newer()
    with torch.distributed.distributed_c10d._coalescing_manager(group, device, async_ops=True) as together:
        begin()
    return together.works


def keys_of_gloo(count: int) -> list[str]:
    """Return the keys that a `ProcessGroupGloo` of ``count`` processes leaves in its store."""
    return [f"0/{rank}" for rank in range(count)]
