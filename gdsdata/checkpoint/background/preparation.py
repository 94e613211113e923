"""How much memory a state will need, before it is saved for the first time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from gdsdata.checkpoint.background.staging_memory import Staging
from gdsdata.checkpoint.background.states import state_of
from gdsdata.checkpoint.dtensors import local_parts
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.checkpoint.tensor_kinds import plain_parts
from gdsdata.checkpoint.tree import leaves
from gdsdata.io import engine

# How often optimizers are looked at until they have made their state. That takes microseconds.
_POLL_S = 0.5
# A step that is held up adds to a state after a pause, so it is looked at for a while longer.
_QUIET_LOOKS = 5
_HEADER_BYTES = 256  # of a storage in an archive, with its alignment


class Size(NamedTuple):
    """The size of a state.

    Attributes:
        bytes: about the size of its file.
        gpu: the first GPU that it has tensors on; None if there is none.
    """

    bytes: int
    gpu: torch.device | None

    def plus(self, other: Size) -> Size:
        """Return the size of both together."""
        return Size(self.bytes + other.bytes, self.gpu or other.gpu)


@collector_paused()
def size_of(state: Mapping[Any, Any]) -> Size:
    """Return the size of a state.

    A model's parameters and buffers are counted, and an optimizer's state; their ``state_dict`` is
    not called, which may have side effects. It is called of other objects.
    """
    sizes: dict[tuple[torch.device, int], int] = {}
    for one in state.values():
        for leaf in leaves(local_parts(_tree_of(one))):
            for tensor in plain_parts(leaf.value) if isinstance(leaf.value, torch.Tensor) else []:
                storage = tensor.untyped_storage()
                sizes[storage.device, storage.data_ptr()] = storage.nbytes()
    padded = sum(size + _HEADER_BYTES + (PAGE_BYTES if size >= PAGE_BYTES else 0) for size in sizes.values())
    return Size(padded, next((device for device, _ in sizes if device.type == "cuda"), None))


class Preparation:
    """Has staging memory made for states before they are saved. One thread at a time may call it.

    It owns a thread while an optimizer has no state yet.

    Args:
        staging: the memory.
        is_needed: this rank saves; else nothing is prepared.
    """

    def __init__(self, staging: Staging, is_needed: bool = True) -> None:
        self._staging, self._is_needed = staging, is_needed
        self._ended = threading.Event()  # of the thread

    def begin(self, state: Mapping[str, Any]) -> None:
        """Prepare for a state in the background.

        Optimizers make their state in their first step: when they have, more is prepared.
        """
        self.end()
        if not self._is_needed:
            return
        size = size_of(state)
        self._staging.prepare(*size)
        new = [one for one in state.values() if isinstance(one, torch.optim.Optimizer) and not one.state]
        if new:
            self._ended = threading.Event()
            arguments = (self._staging, size, [weakref.ref(one) for one in new], self._ended)
            thread = threading.Thread(target=_await_states, args=arguments, name="gdsdata-prepare", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit is reached
                _warn(error)

    def attempt(self, state: Mapping[str, Any]) -> None:
        """Do as `begin` does, and warn of an error."""
        try:
            self.begin(state)
        except Exception as error:
            _warn(error)

    def end(self) -> None:
        """Look at optimizers no more."""
        self._ended.set()

    def close(self) -> None:
        """Prepare nothing from now on."""
        self._is_needed = False
        self.end()


def _warn(error: Exception) -> None:
    engine.warn_once(f"memory for saves could not be made in advance ({error!r}): save() makes it")


def _await_states(
    staging: Staging, rest: Size, optimizers: list[weakref.ref[torch.optim.Optimizer]], ended: threading.Event
) -> None:
    """Prepare when optimizers have made their state. Runs in a thread of its own.

    Args:
        staging: the memory.
        rest: the size of everything else that is saved.
        optimizers: that have no state yet.
        ended: ends it early.
    """
    prepared, seen, quiet = [0], [0], 0  # how many values their states have; looks without a change
    while (seen.count(0) > 0 or quiet < _QUIET_LOOKS) and not ended.wait(_POLL_S):
        there = [one for one in (reference() for reference in optimizers) if one is not None]
        if not there:
            return
        counts = [_values_in(one) for one in there]
        if counts == seen != prepared and any(counts):  # no step is adding to them
            staging.prepare(*rest.plus(size_of(dict(enumerate(there)))))
            prepared = counts
        quiet = quiet + 1 if counts == seen else 0
        seen = counts
        del there


def _values_in(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(values) if isinstance(values, dict) else 1 for values in list(optimizer.state.values()))


def _tree_of(one: Any) -> Any:
    if isinstance(one, torch.nn.Module):
        return [*one.parameters(), *one.buffers()]
    if isinstance(one, torch.optim.Optimizer):
        return [dict(values) if isinstance(values, dict) else values for values in list(one.state.values())]
    return state_of(one)


def end_preparing(staging: Staging, preparation: Preparation, process: int) -> None:
    """End the threads that prepare, in the process that has them.

    A forked child has no such threads, and their locks may be held forever.
    """
    if os.getpid() == process:
        staging.stop()
        preparation.close()
