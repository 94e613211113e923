"""Checkpoints of Megatron-core, written and read by gdsdata. Training data: `megatron_data`."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import uuid
from collections.abc import Iterator
from typing import Any

import torch

from gdsdata.checkpoint.dcp.storage_reader import GDSStorageReader
from gdsdata.checkpoint.dcp.storage_writer import GDSStorageWriter
from gdsdata.fork_safe import fork_safe_lock
from gdsdata.integrations.overrides import check_overrides
from gdsdata.integrations.versions import importing
from gdsdata.io.options import EngineOptions, options_of

with importing("megatron-core"):
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

__all__ = ["GDSLoadStrategy", "GDSSaveStrategy"]

_Items = list[tuple[Any, Any]]  # items of a plan, and their data
_loading = fork_safe_lock()  # guards the name in Megatron's module that a load replaces
# Reports of `_write`, of saves that are not finalized yet: all share a queue of Megatron's.
_unclaimed: dict[str, Any] = {}


class GDSSaveStrategy(strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron may be absent
    """Saves the format ``torch_dist`` of Megatron-core by `GDSStorageWriter`.

        dist_checkpointing.save(state, folder, GDSSaveStrategy(thread_count=2))

    Megatron's own plan, its cache of plans and its wrapper `FullyParallelSaveStrategyWrapper` work
    as with the stock strategy, and stock code reads the files.

    ``.metadata`` is written when the files of all ranks are on storage, and ``metadata.json``
    after it. If a rank fails, every rank raises the error and neither is written. A checkpoint that
    the folder has already stays complete until then.

    With ``async_sharded_save=True`` and ``async_strategy="mcore"``, Megatron's `AsyncCallsQueue`
    writes in a process of its own. Tensors are copied to the host before. A save without it writes
    tensors from where they are.

    Args:
        options: of the engine; None: the defaults.
        settings, named: of `TorchDistSaveShardedStrategy`. Each of a rank's ``thread_count`` files
            is written by all of the engine's threads, so 1 is enough.
    """

    def __init__(self, *settings: Any, options: EngineOptions | None = None, **named: Any) -> None:
        super().__init__(*settings, **named)
        self.options = options_of(options)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save a state; it is on storage when this returns.

        Raises:
            CheckpointException: a rank failed. Every rank raises it.

        Stream semantics: tensors on a GPU are read after all work that the current stream of that
        GPU has so far.
        """
        self.async_save(sharded_state_dict, checkpoint_dir, "mcore")._replace(preload_fn=None).execute_sync()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "nvrx") -> AsyncRequest:
        """Return what `AsyncCallsQueue` of Megatron-core takes. See the class.

        Raises:
            ValueError: ``async_strategy`` is not ``"mcore"``.
        """
        if async_strategy != "mcore":
            raise ValueError(f'async_strategy={async_strategy!r} has writers of its own: pass async_strategy="mcore"')
        return super().async_save(sharded_state_dict, checkpoint_dir, async_strategy)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, _: str) -> AsyncRequest:
        """Return the request that writes what Megatron's writer has planned."""
        _, metadata, ranks = save_state_dict_ret
        folder, token, results = os.fspath(writer.checkpoint_dir), uuid.uuid4().hex, writer.results_queue
        committer = _Writer(folder, options=self.options)
        files = [(committer.unused(name), [*objects, *tensors]) for _, name, (objects, tensors) in writer.write_buckets]

        def finalize() -> None:
            ranks.all_reduce(
                "write",
                lambda: _result_of(token, results) if files else [],
                lambda of_ranks: committer.finish(metadata, of_ranks),
            )

        if not files:
            return AsyncRequest(None, (), [finalize])
        write = functools.partial(_write, folder, self.options, token)
        arguments = (torch.distributed.get_rank(), files, results)  # Megatron replaces the second by what is staged
        return AsyncRequest(write, arguments, [finalize], preload_fn=functools.partial(_staged, files))


_OVERRIDDEN = ("save", "async_save", "_get_save_and_finalize_callbacks")
check_overrides(strategies.TorchDistSaveShardedStrategy, GDSSaveStrategy, _OVERRIDDEN, "megatron-core", "0.19")


class _Writer(GDSStorageWriter):
    _data_files = "*__*_*.distcp"  # Megatron's separation_hint comes first

    def unused(self, name: str) -> str:
        """Return a name for a data file that is none of the checkpoint in the folder."""
        number = self._number()
        return name if number == "0" else name.replace(".distcp", f"_{number}.distcp")


def _staged(files: list[tuple[str, _Items]]) -> list[tuple[str, _Items]]:
    """Return copies of all tensors in host memory. They are complete when this returns."""

    def copied(data: Any) -> Any:  # to pinned memory, if it comes from a GPU
        return data.to("cpu", copy=True, non_blocking=True) if isinstance(data, torch.Tensor) else data

    staged = [(name, [(item, copied(data)) for item, data in items]) for name, items in files]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return staged


def _write(
    folder: str, options: EngineOptions, token: str, _: int, files: list[tuple[str, _Items]], results: Any
) -> None:
    """Write a rank's files, and report where their items are, or the error."""
    try:
        writer = GDSStorageWriter(folder, options=options)
        written: Any = [one for name, items in files for one in writer.write_items(name, items)]
    except Exception as error:
        written = f"{type(error).__name__}: {error}"  # not every error can be sent to another process
    results.put((token, written))


def _result_of(token: str, results: Any) -> Any:
    """Return what `_write` has reported. It has ended.

    Raises:
        RuntimeError: it has failed, or its process was killed.
    """
    with contextlib.suppress(queue.Empty):
        while token not in _unclaimed:
            found, written = results.get_nowait()
            _unclaimed[found] = written
    written = _unclaimed.pop(token, "the process that writes has ended without a result")
    if isinstance(written, str):
        raise RuntimeError(f"this rank's part of the checkpoint was not written: {written}")
    return written


class GDSLoadStrategy(strategies.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads the format ``torch_dist`` of Megatron-core by `GDSStorageReader`.

        state = dist_checkpointing.load(state, folder, GDSLoadStrategy())

    It reads what `GDSSaveStrategy` and the stock strategy have saved, on any number of ranks. One
    load of a process runs at a time. Megatron itself reads the small state that ranks share. A load
    raises errors as `GDSStorageReader` does.

    Args:
        verify: compare the checksum of each stored tensor, which is then read as a whole.
        options: of the engine; None: the defaults.
        settings, named: of `TorchDistLoadShardedStrategy`.
    """

    def __init__(
        self, *settings: Any, verify: bool = False, options: EngineOptions | None = None, **named: Any
    ) -> None:
        super().__init__(*settings, **named)
        self._make_reader = functools.partial(_Reader, verify=verify, options=options)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        """Load into a state. The bytes are in place when this returns, for every stream."""
        with self._reading():
            return super().load(sharded_state_dict, checkpoint_dir, async_strategy)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Have Megatron make gdsdata's readers."""
        with _loading:
            stock = strategies._get_filesystem_reader
            strategies._get_filesystem_reader = lambda folder, *_, **__: self._make_reader(folder)
            try:
                yield
            finally:
                strategies._get_filesystem_reader = stock


class _Reader(GDSStorageReader):
    """A reader of one load, which reads ``.metadata`` once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_metadata"):
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
