"""Checkpoints of DeepSpeed that gdsdata writes and reads. Checked with DeepSpeed 0.19.8."""

from __future__ import annotations

import os
from typing import Any

import torch

from gdsdata.checkpoint.api import save
from gdsdata.checkpoint.hooks import torch_hooks
from gdsdata.checkpoint.synced_folders import make_folder, sync_file, sync_folder
from gdsdata.collective.agreement import Agreement, group_of
from gdsdata.integrations.versions import importing
from gdsdata.io.options import EngineOptions, options_of

with importing("deepspeed"):
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

__all__ = ["GDSCheckpointEngine", "use"]

# DeepSpeed copies what it has offloaded to NVMe below this folder of a checkpoint.
_COPIES = "offloaded_tensors"


def use(engine: Any, options: EngineOptions | None = None, timeout_s: float = 1800.0) -> Any:
    """Have a DeepSpeed engine save and load its checkpoints by gdsdata.

        engine, *_ = deepspeed.initialize(model=model, config=config)
        gdsdata.integrations.deepspeed.use(engine)
        engine.save_checkpoint("run")
        engine.load_checkpoint("run")

    Args:
        engine: of DeepSpeed, a `PipelineEngine` too.
        options, timeout_s: see `GDSCheckpointEngine`.

    Returns:
        ``engine``.

    Raises:
        ValueError: DeepSpeed's configuration has another writer of checkpoints. Then DeepSpeed has
            chosen already which ranks write.
    """
    its = type(engine.checkpoint_engine).__name__
    if its not in ("TorchCheckpointEngine", "GDSCheckpointEngine"):
        raise ValueError(
            f"DeepSpeed's configuration chose {its} for checkpoints: leave out `checkpoint.writer` and "
            "`datastates_ckpt` there"
        )
    engine.checkpoint_engine = GDSCheckpointEngine(options=options, timeout_s=timeout_s)
    return engine


class GDSCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed declares no types
    """Writes the files of a checkpoint by `gdsdata.save`, and reads them with `torch_hooks`.

    The files have the format of `torch.save`, so DeepSpeed's tools read them. Files that
    DeepSpeed's own engine wrote are loaded too.

    If a file cannot be written, `commit` raises that error on all ranks. DeepSpeed then leaves
    ``latest`` as it was. So a checkpoint that ``latest`` names is complete, and on storage.

    Args:
        config_params: of DeepSpeed. It is not used.
        options: of gdsdata's engine; None: the defaults.
        timeout_s: how long `commit` waits for the slowest rank.
    """

    def __init__(
        self, config_params: Any = None, *, options: EngineOptions | None = None, timeout_s: float = 1800.0
    ) -> None:
        super().__init__(config_params)
        self.name = type(self).__name__
        self._options, self._timeout_s = options_of(options), timeout_s
        self._error: Exception | None = None  # of this rank, since `create`

    def create(self, info: Any) -> None:
        """Begin a checkpoint, and forget one that was not committed."""
        self._error = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it. They are on storage when this returns.

        Raises:
            FileExistsError: it is there, and ``exist_ok`` is false.
            OSError: it cannot be made.
        """
        if os.path.isdir(path) and not exist_ok:
            raise FileExistsError(f"{path} is there already")
        make_folder(path)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file. It is on storage when this returns, or `commit` raises why it is not.

        After an error, the other files of the checkpoint are not written on this rank.

        Stream semantics: as `gdsdata.save`.
        """
        if self._error is not None:
            return
        try:
            save(state_dict, path, options=self._options)
        except Exception as error:  # the other ranks wait in `commit`, and should raise it too
            self._error = error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file, as `torch.load`. Any object in it is made (``weights_only=False``).

        Raises:
            FileNotFoundError, CorruptData, IoError, ...: as `torch.load` with `torch_hooks`.

        Stream semantics: as `gdsdata.load`.
        """
        with torch_hooks():
            return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        """Wait until all ranks have written their files. All of them call this.

        Returns:
            True: all files of the checkpoint are on storage.

        Raises:
            IoError, pickle.PicklingError, ...: a rank could not write a file. All ranks raise it.
            RankLost: a rank has ended, or did not come in time.
        """
        error, self._error = self._error, None
        group = group_of("auto")
        if group is None:
            self._finish(info, error)
            return True
        call = {"call": "commit", "tag": info.tag}
        with Agreement(group, self._timeout_s).session(call, _take_part):
            self._finish(info, error)
        return True

    def _finish(self, info: Any, error: Exception | None) -> None:
        if error is not None:
            raise error
        for folder, _, names in os.walk(os.path.join(info.save_dir, info.tag, _COPIES)):
            for name in names:
                sync_file(os.path.join(folder, name))
            sync_folder(folder)
        for folder in (os.path.join(info.save_dir, info.tag), info.save_dir):
            if os.path.isdir(folder):  # nodes may have folders of their own
                sync_folder(folder)


def _take_part(session: Any, headers: Any) -> None:
    raise AssertionError("no rank reads in a commit")
