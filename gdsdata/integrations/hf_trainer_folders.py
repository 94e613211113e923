"""The folders of checkpoints that a Trainer of transformers writes."""

from __future__ import annotations

import os
import re
import shutil

from gdsdata.io.engine import warn_once
from gdsdata.storage.paths import absolute

STATE_OF_TRAINER = "trainer_state.json"  # which a Trainer writes last
_FOLDER = re.compile(r"checkpoint-[0-9]+")


def is_complete(checkpoint: str) -> bool:
    """Return whether a folder has all files of a checkpoint."""
    return os.path.exists(os.path.join(checkpoint, STATE_OF_TRAINER))


def newest_complete(run: str) -> str | None:
    """Return the newest complete checkpoint of a run; None: it has no checkpoints.

    There is a warning if newer ones are not complete.

    Raises:
        FileNotFoundError: it has checkpoints, and none is complete.
    """
    folders = _folders(run)
    for folder in reversed(folders):
        if is_complete(folder):
            if folder != folders[-1]:
                warn_once(
                    f"'{folders[-1]}' has no {STATE_OF_TRAINER}, because its save did not end. Training continues "
                    f"from '{folder}'"
                )
            return folder
    if folders:
        raise FileNotFoundError(
            f"none of the {len(folders)} checkpoints in '{run}' has a {STATE_OF_TRAINER}, so no save has ended: train "
            "without resume_from_checkpoint"
        )
    return None


def remove_old(newest: str, limit: int, best: str | None) -> None:
    """Keep ``limit`` checkpoints of a run, up to its newest complete one.

    Args:
        newest: that one. Those behind it are being written, and stay.
        limit: how many.
        best: a checkpoint that stays in any case.

    A folder that cannot be removed stays, with a warning.
    """
    folders = [one for one in _folders(os.path.dirname(newest)) if _step_of(one) < _step_of(newest)]
    stay = [one for one in folders if best is not None and absolute(one) == absolute(best)]
    complete = [one for one in folders if one not in stay and is_complete(one)]
    kept = max(limit - 1 - len(stay), 0)
    stay += complete[max(len(complete) - kept, 0) :]
    for one in folders:
        if one not in stay:
            try:
                shutil.rmtree(one)
            except OSError as error:  # the new checkpoint is complete all the same
                warn_once(f"the old checkpoint '{one}' could not be removed: {error}")


def _folders(run: str) -> list[str]:
    """Return the folders of checkpoints, the oldest first."""
    try:
        names = os.listdir(run)
    except FileNotFoundError:
        return []
    places = [os.path.join(run, name) for name in names if _FOLDER.fullmatch(name)]
    return sorted(filter(os.path.isdir, places), key=_step_of)


def _step_of(folder: str) -> int:
    return int(os.path.basename(folder).rpartition("-")[2])
