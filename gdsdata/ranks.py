"""Which share of the data a process reads: from arguments, a device mesh, torch.distributed or the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def rank_and_world_size(
    rank: int | None,
    world_size: int | None,
    device_mesh: DeviceMesh | None = None,
    dp_dim: str | int | Sequence[str | int] | None = None,
) -> tuple[int, int]:
    """The first of these that is given: the arguments, the mesh, torch.distributed, RANK and WORLD_SIZE, one process.

    Raises:
        ValueError: half of what is needed is given, or twice of it, or the mesh has no such dimension.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size}: give both or neither")
    if device_mesh is None and dp_dim is not None:
        raise ValueError(f"dp_dim={dp_dim!r} is a dimension of a device_mesh, which is not given")
    if rank is not None and world_size is not None:
        if device_mesh is not None:
            raise ValueError(f"rank={rank}, world_size={world_size} and a device_mesh are given: give one of them")
        return rank, world_size
    if device_mesh is not None:
        return _place_in(device_mesh, dp_dim)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _of_environment()


def _of_environment() -> tuple[int, int]:
    rank, world_size = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    said = f"of the environment, RANK is {rank!r} and WORLD_SIZE {world_size!r}"
    try:
        found = int(rank or 0), int(world_size or 1)
    except ValueError:
        raise ValueError(f"{said}, which are no numbers: set both, or neither, or pass rank and world_size") from None
    if found[1] > 1 and not rank:  # or all would read what rank 0 reads
        raise ValueError(f"{said}: set both, or neither, or pass rank and world_size")
    return found


def _place_in(mesh: DeviceMesh, dp_dim: str | int | Sequence[str | int] | None) -> tuple[int, int]:
    """This process's place along the data-parallel dimensions of a mesh, the first one outermost, and their size.

    Processes that differ along other dimensions alone (tensor, context or pipeline parallel) have the same place, and
    so read the same batches.
    """
    names = mesh.mesh_dim_names or ()
    if dp_dim is None:
        if mesh.ndim != 1:
            raise ValueError(f"the device_mesh has {mesh.ndim} dimensions {names}: say by dp_dim= which share the data")
        dp_dim = 0
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this process is not in the device_mesh, so it has no share of the data")
    rank, world_size = 0, 1
    used: set[int] = set()
    for dim in [dp_dim] if isinstance(dp_dim, (str, int)) else dp_dim:
        if dim in names:
            at = names.index(dim)
        elif isinstance(dim, int) and -mesh.ndim <= dim < mesh.ndim:
            at = dim
        else:
            raise ValueError(f"dp_dim={dp_dim!r}: the device_mesh has the dimensions {names or range(mesh.ndim)}")
        if at % mesh.ndim in used:
            raise ValueError(f"dp_dim={dp_dim!r} names a dimension of the device_mesh twice")
        used.add(at % mesh.ndim)
        rank, world_size = rank * mesh.size(at % mesh.ndim) + coordinate[at], world_size * mesh.size(at % mesh.ndim)
    return rank, world_size
