"""`Ranks`: which share of the data a process reads. `device_of_batches`: to which GPU.

Arguments, a device mesh, torch.distributed or a launcher's variables say it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed
from torch.utils.data import get_worker_info

from gdsdata.warn import warn
from gdsdata.whole_numbers import shown, whole_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REMEDY = (
    "Set RANK and WORLD_SIZE, pass sharding=gdsdata.Sharding(rank=..., world_size=...), or call init_process_group() "
    "before iterating."
)
# SLURM names an allocation so if it was asked for without a script.
_INTERACTIVE_JOBS = ("bash", "interactive")


class Share(NamedTuple):
    """The share of each step that a process reads."""

    rank: int
    world_size: int


class Ranks:
    """A data set's rank and world size, looked up when they are needed.

    The first of these that says something:

    1. ``rank`` and ``world_size``, or ``device_mesh`` and ``dp_dim``: these never change.
    2. torch.distributed, once it is initialized.
    3. In a DataLoader's worker process: what the process that began the worker found.
    4. ``RANK`` and ``WORLD_SIZE``, as torchrun sets them.
    5. ``WORLD_SIZE``, ``NODE_RANK`` and ``LOCAL_RANK``, as Lightning's launcher sets them, which
       sets no ``RANK``. On another node than the first, ``LOCAL_WORLD_SIZE`` too.
    6. ``OMPI_COMM_WORLD_RANK`` and ``OMPI_COMM_WORLD_SIZE`` (Open MPI), or ``PMI_RANK`` and
       ``PMI_SIZE`` (MPICH).
    7. ``SLURM_PROCID`` and ``SLURM_STEP_NUM_TASKS`` or ``SLURM_NTASKS``, in a process that srun
       started. A batch script or a notebook in an allocation for several tasks has these variables
       too, but is one process: that warns.

    Raises:
        TypeError: a rank or world size is no whole number, or the mesh is none.
        ValueError: one of a pair of arguments is missing, both arguments and a mesh are given, or
            the mesh has no such dimension.
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: DeviceMesh | None = None,
        dp_dim: str | int | Sequence[str | int] | None = None,
    ) -> None:
        self._given = _given(rank, world_size, device_mesh, dp_dim)
        self._of_parent: tuple[int, Share | None] | None = None  # the process that pickled this, and its share

    @property
    def are_given(self) -> bool:
        """Arguments or a mesh said them."""
        return self._given is not None

    def found(self) -> Share | None:
        """Return this process's share; None if nothing indicates several processes.

        Raises:
            ValueError: the environment says that there are several, but not which one this is.
        """
        if self._given is not None:
            return self._given
        if is_distributed():
            return Share(torch.distributed.get_rank(), torch.distributed.get_world_size())
        if get_worker_info() is not None and self._of_parent is not None:
            parent = multiprocessing.parent_process()
            if parent is not None and parent.pid == self._of_parent[0] and self._of_parent[1] is not None:
                return self._of_parent[1]
        return _of_environment()

    def found_or_none(self) -> Share | None:
        """Return `found`, or None if it raises: the environment is at fault."""
        try:
            return self.found()
        except ValueError:
            return None

    def of_state(self, state: Mapping[str, Any], batch_size: int) -> Share:
        """Return the share that a data set's state is loaded for: this process's.

        If nothing says yet how many ranks there will be, it is one of as many as the state was
        taken with. Iteration compares them with those that there are then.
        """
        step, world_size = state.get("samples_per_step"), 1
        if isinstance(step, int) and step > 0 and step % batch_size == 0:
            world_size = step // batch_size
        return self.found_or_none() or Share(0, world_size)

    def watch(self, share: Share) -> Callable[[], None]:
        """Return a check for an iterator of ``share``.

        It raises RuntimeError once torch.distributed says that the share is another one.
        """
        if self._given is not None or is_distributed():
            return lambda: None

        def check() -> None:
            found = self.found() if is_distributed() else None
            if found is not None and found != share:
                raise _changed(share, found)

        return check

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the share, because a worker has no torch.distributed."""
        return {**self.__dict__, "_of_parent": (os.getpid(), self.found_or_none())}


class EpochRanks:
    """The share that an epoch began with, which stays the same until its end."""

    def __init__(self) -> None:
        self._fixed: tuple[int, int, Share] | None = None  # process, epoch and share

    def fix(self, epoch: int, found: Share | None) -> Share:
        """Return the share of ``epoch``, which stays the same from now on.

        Args:
            epoch: its number.
            found: the share that is known now; None: nothing says that there are several processes.

        Raises:
            RuntimeError: the epoch has another share already.
        """
        fixed = self.of(epoch)
        if fixed is None:
            fixed = found or Share(0, 1)
            self._fixed = os.getpid(), epoch, fixed
        elif found is not None and found != fixed:
            raise _changed(fixed, found)
        return fixed

    def of(self, epoch: int) -> Share | None:
        """Return the share that was fixed for ``epoch``; None if none was."""
        if self._fixed is not None and self._fixed[:2] == (os.getpid(), epoch):
            return self._fixed[2]
        return None

    def release(self) -> None:
        """Release the share: the next epoch asks anew."""
        self._fixed = None


def _changed(before: Share, now: Share) -> RuntimeError:
    return RuntimeError(
        f"when this epoch's data set was iterated, or its len() asked for, this process was rank {before.rank} of "
        f"{before.world_size}, and now it is rank {now.rank} of {now.world_size}. The ranks of an epoch do not change. "
        "Call init_process_group() before len() and iteration, or pass sharding=gdsdata.Sharding(rank=..., "
        "world_size=...). Lightning's fit() makes the ranks: there, make the data set in train_dataloader(). Another "
        "epoch (set_epoch) begins with the ranks of that moment."
    )


def is_distributed() -> bool:
    """Return whether torch.distributed is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _given(
    rank: int | None,
    world_size: int | None,
    device_mesh: DeviceMesh | None,
    dp_dim: str | int | Sequence[str | int] | None,
) -> Share | None:
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size}: give both or neither")
    if device_mesh is None and dp_dim is not None:
        raise ValueError(f"dp_dim={dp_dim!r} is a dimension of a device_mesh, which is not given")
    if rank is not None and world_size is not None:
        if device_mesh is not None:
            raise ValueError(f"rank={rank}, world_size={world_size} and a device_mesh are given: give one of them")
        return Share(whole_number("rank", rank), whole_number("world_size", world_size))
    return None if device_mesh is None else _place_in(device_mesh, dp_dim)


# ------------------------------------------------------------------------------------------------- the environment

_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def device_of_batches(device: torch.device | str | None) -> torch.device | str:
    """Return the device of batches: the given one, or if that is None the GPU of this process.

    That is the current GPU, or the CPU if there is none. In a process of a launcher, it is the GPU
    of the process's place on its node, as in most frameworks. They make it the current one, but
    maybe after the data set is made.
    """
    if device is None and not torch.cuda.is_available():
        return "cpu"
    place = _place_of_another_gpu() if device is None or str(device) == "cuda" else None
    if device is None:
        return "cuda" if place is None else f"cuda:{place}"
    if place is not None:
        _warn_once(
            f'gdsdata: device="cuda" is cuda:0 in this process, whose place on its node is {place}. If it trains on '
            f"cuda:{place}, leave device= out, or call torch.cuda.set_device({place}) before."
        )
    return device


def _place_of_another_gpu() -> int | None:
    """Return this process's place on its node, if its GPU is not GPU 0, the current one."""
    said = next(filter(None, map(os.environ.get, _LOCAL_RANKS)), "")
    if not (said.isdigit() and torch.cuda.is_available() and 0 < int(said) < torch.cuda.device_count()):
        return None
    return int(said) if torch.cuda.current_device() == 0 else None


def _of_environment() -> Share | None:
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if rank is not None and world_size is not None:
        return _checked("RANK", "WORLD_SIZE")
    found = _of_lightning() or _of_mpi() or _of_slurm()
    if found is not None:
        if rank not in (None, found.rank) or world_size not in (None, found.world_size):
            raise ValueError(
                f"the environment's {_said('RANK', 'WORLD_SIZE')}, but its launcher says rank {found.rank} of "
                f"{found.world_size}. {_REMEDY}"
            )
        return found
    if (world_size or 1) > 1 or rank or _number("LOCAL_RANK"):  # or all would read what rank 0 reads
        raise ValueError(
            f"the environment's {_said('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}: there are several processes, but it does "
            f"not say which one this is, or how many there are. {_REMEDY}"
        )
    return None if rank is None and world_size is None else Share(0, 1)


def _of_lightning() -> Share | None:
    names = ("WORLD_SIZE", "NODE_RANK", "LOCAL_RANK")
    if not all(map(os.environ.get, names)):
        return None
    world_size, node, local = (_parsed(name, os.environ[name]) for name in names)
    ranks_a_node = _number("LOCAL_WORLD_SIZE")
    if node and not ranks_a_node:
        said = _said("NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        raise ValueError(f"the environment's {said}: how many ranks a node has is not said. {_REMEDY}")
    rank = node * (ranks_a_node or 0) + local
    if rank >= world_size:
        said = _said("NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        raise ValueError(f"the environment's {said}: that is rank {rank} of {world_size}. {_REMEDY}")
    return Share(rank, world_size)


def _of_mpi() -> Share | None:
    for rank_name, size_name in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if _number(rank_name) is not None or _number(size_name) is not None:
            return _checked(rank_name, size_name)
    return None


def _of_slurm() -> Share | None:
    size_name = "SLURM_STEP_NUM_TASKS" if _number("SLURM_STEP_NUM_TASKS") is not None else "SLURM_NTASKS"
    rank, tasks = _number("SLURM_PROCID"), _number(size_name)
    if rank is None or tasks is None or (tasks == 1 and rank == 0):
        return None
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID")
    is_of_a_step = bool(step) or not job
    if os.environ.get("SLURM_JOB_NAME") in _INTERACTIVE_JOBS:
        is_of_a_step = size_name == "SLURM_STEP_NUM_TASKS"
    if rank == 0 and not is_of_a_step:
        _warn_once(
            f"gdsdata: SLURM's allocation is for {tasks} tasks, but srun did not start this process (SLURM_STEP_ID is "
            "not set, or the job is interactive), so it reads all of the data, as one process. If it is one of several "
            "ranks, start them with srun; else pass sharding=gdsdata.Sharding(rank=0, world_size=1)."
        )
        return None
    return _checked("SLURM_PROCID", size_name)


@functools.cache
def _warn_once(message: str) -> None:
    warn(message, UserWarning)


def _checked(rank_name: str, size_name: str) -> Share:
    rank, world_size = _number(rank_name), _number(size_name)
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(f"the environment's {_said(rank_name, size_name)}: that is no rank of so many. {_REMEDY}")
    return Share(rank, world_size)


def _number(name: str) -> int | None:
    """Return the number in an environment variable; None if it is not set, or empty."""
    value = os.environ.get(name)
    return _parsed(name, value) if value else None


def _parsed(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"the environment's {_said(name)}, which is no number. {_REMEDY}") from None


def _said(*names: str) -> str:
    return ", ".join(
        f"{name} is {os.environ[name]!r}" if name in os.environ else f"{name} is not set" for name in names
    )


def _place_in(mesh: DeviceMesh, dp_dim: str | int | Sequence[str | int] | None) -> Share:
    """Return place and size along a mesh's data-parallel dimensions.

    The first of these dimensions is the outermost.

    Processes that differ along other dimensions alone (tensor, context or pipeline parallel) have
    the same place, and so read the same batches.
    """
    coordinate = _coordinate_in(mesh)
    rank, world_size = 0, 1
    for dim in _data_dims(mesh, dp_dim):
        rank, world_size = rank * mesh.size(dim) + coordinate[dim], world_size * mesh.size(dim)
    return Share(rank, world_size)


def peers_in(mesh: DeviceMesh, dp_dim: str | int | Sequence[str | int] | None) -> list[int]:
    """Return the ranks of the processes that get the same batches as this one, itself included.

    Raises:
        ValueError: the mesh has no such dimension, or not this process.
    """
    coordinate, data_dims = _coordinate_in(mesh), _data_dims(mesh, dp_dim)
    chosen = tuple(coordinate[dim] if dim in data_dims else slice(None) for dim in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[chosen].flatten().tolist()
    return ranks


def _coordinate_in(mesh: DeviceMesh) -> Sequence[int]:
    if not hasattr(mesh, "get_coordinate"):
        raise TypeError(f"device_mesh={shown(mesh)} must be a DeviceMesh of torch.distributed, or None")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this process is not in the device_mesh, so it has no share of the data")
    return coordinate


def _data_dims(mesh: DeviceMesh, dp_dim: str | int | Sequence[str | int] | None) -> list[int]:
    """Return the data-parallel dimensions of a mesh, the outermost first, as numbers from 0 on."""
    names = mesh.mesh_dim_names or ()
    if dp_dim is None:
        if mesh.ndim != 1:
            raise ValueError(f"the device_mesh has {mesh.ndim} dimensions {names}: say by dp_dim= which share the data")
        dp_dim = 0
    dims: list[int] = []
    for dim in [dp_dim] if isinstance(dp_dim, (str, int)) else dp_dim:
        if dim in names:
            at = names.index(dim)
        elif isinstance(dim, int) and -mesh.ndim <= dim < mesh.ndim:
            at = dim
        else:
            raise ValueError(f"dp_dim={dp_dim!r}: the device_mesh has the dimensions {names or range(mesh.ndim)}")
        if at % mesh.ndim in dims:
            raise ValueError(f"dp_dim={dp_dim!r} names a dimension of the device_mesh twice")
        dims.append(at % mesh.ndim)
    return dims
