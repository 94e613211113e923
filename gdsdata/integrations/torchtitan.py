"""Checkpoints of torchtitan, written and read by gdsdata. Training data: `torchtitan_data`."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from gdsdata.checkpoint.dcp.planner import GDSLoadPlanner, GDSSavePlanner
from gdsdata.checkpoint.dcp.storage_reader import GDSStorageReader
from gdsdata.checkpoint.dcp.storage_writer import GDSStorageWriter
from gdsdata.integrations.overrides import check_overrides
from gdsdata.integrations.versions import importing

with importing("torchtitan"):
    from torchtitan.components.checkpointer.base import MODEL
    from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
    from torchtitan.tools import filesystem

__all__ = ["GDSCheckpointManager"]

_OF_MODELS = (".safetensors", ".safetensors.index.json")  # files of a last checkpoint for Hugging Face


class GDSCheckpointManager(CheckpointManager):  # type: ignore[misc]  # torchtitan may be absent
    """Torchtitan's checkpoint manager, with files written and read by gdsdata.

        config.checkpoint = GDSCheckpointManager.Config(enable=True, interval=500)

    Folders, names and options are those of torchtitan's own `CheckpointManager`, and so are the
    files: either reads what the other has saved. Files for Hugging Face (``last_save_in_hf`` and
    ``initial_load_in_hf``) are left to torchtitan.

    With ``async_mode="async"``, the default, a save copies the state to host memory, which is
    pinned if the state is on a GPU and kept for the next save. Threads write it while training goes
    on. Torchtitan's other mode, ``"async_with_pinned_mem"``, needs a process for that, and is
    refused here.

    A checkpoint is complete when its ``.metadata`` is on storage, which comes last. If a save fails
    on a rank, the next save, or `close`, raises the error on all ranks. ``keep_latest_k`` counts
    complete checkpoints. An older one is removed after newer ones are complete, and so are the
    remains of older failed saves.

    ``folder`` may be a URL. Torchtitan looks for checkpoints by fsspec, so it needs fsspec's
    package for the scheme too.
    """

    stager: DefaultStager | None  # made by the first save in the background, and kept
    save_future: Any  # the future of the save in progress; None: there is none
    _in_progress: str | None = None  # the checkpoint that is being written

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """Torchtitan's options, and ``async_mode``: ``"async"`` or ``"disabled"``."""

        async_mode: Literal["disabled", "async"] = "async"

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                raise ValueError(
                    f'checkpoint.async_mode={self.async_mode!r} writes in a process of its own: pass "async", which '
                    "copies to pinned memory too, and writes in threads that leave Python's lock alone"
                )

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a state, or begin to. Return the future of a save in the background.

        Raises:
            CheckpointException: a rank failed. Every rank raises it.

        Stream semantics: tensors on a GPU are copied after the work that the current stream of that
        GPU has so far. The copies are complete when this returns.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer, planner = GDSStorageWriter(checkpoint_id), GDSSavePlanner()
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer, planner=planner)
            return None
        if self.stager is None:
            on_gpu = torch.cuda.is_available()
            self.stager = DefaultStager(
                StagingOptions(on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu)
            )
        self._in_progress = checkpoint_id
        return dcp.async_save(
            state_dict, storage_writer=writer, planner=planner, process_group=self.pg, async_stager=self.stager
        )

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a checkpoint into a state.

        Raises:
            CheckpointException: a rank failed, as of `GDSStorageReader`. Every rank raises it.
        """
        if from_hf:
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        dcp.load(state_dict, storage_reader=GDSStorageReader(checkpoint_id), planner=GDSLoadPlanner())
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
        return None

    def _wait_for_saving(self) -> None:
        saving, self.save_future = self.save_future, None
        try:
            saving.result()
        finally:
            self._in_progress = None
        self._purge_stale_checkpoints()

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()

    def _purge_stale_checkpoints(self) -> None:
        if not self.keep_latest_k or torch.distributed.get_rank() or not filesystem.isdir(self.folder):
            return
        complete: list[tuple[int, str]] = []
        remains: list[tuple[int, str]] = []
        for name in filesystem.listdir(self.folder):
            found, folder = re.fullmatch(r"step-(\d+)", name), filesystem.join(self.folder, name)
            if found is None or folder == self._in_progress:
                continue
            with contextlib.suppress(OSError):  # the thread that removes folders was faster
                files = filesystem.listdir(folder)
                is_complete = any(one == ".metadata" or one.endswith(_OF_MODELS) for one in files)
                (complete if is_complete else remains).append((int(found[1]), folder))
        complete.sort()
        newest = complete[-1][0] if complete else 0
        stale = complete[: -self.keep_latest_k] + [one for one in remains if one[0] < newest]
        for _, folder in stale:
            self.purge_queue.put(folder)


check_overrides(
    CheckpointManager,
    GDSCheckpointManager,
    ("dcp_save", "dcp_load", "_wait_for_saving", "_close", "_purge_stale_checkpoints"),
    "torchtitan",
    "0.3",
)
