"""The complete checkpoints of a local folder, and of the store that they are uploaded to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gdsdata.checkpoint.background.checkpoint_folder import CheckpointFolder
from gdsdata.checkpoint.background.manifest import Manifest
from gdsdata.checkpoint.background.remote_folder import RemoteFolder
from gdsdata.checkpoint.background.replicas import Replicas
from gdsdata.checkpoint.explanations import is_step, step_in_words


class Candidate(NamedTuple):
    """A complete checkpoint.

    Attributes:
        manifest: where it is read from; of one in both places, the local one.
        sequence: its place in the order of both.
        is_local: whether it is read from the local folder.
        is_uploaded: whether the store has it.
    """

    manifest: Manifest
    sequence: int
    is_local: bool
    is_uploaded: bool


def in_order(local: Sequence[Manifest], remote: Sequence[Manifest]) -> list[Candidate]:
    """Return the checkpoints of both places, the newest last.

    The sequence of an uploaded checkpoint is higher than that of the local one if the store had
    newer ones than this machine knew of. Local ones that were committed later are newer too.

    Args:
        local, remote: the complete ones, the newest last.
    """
    uploaded = {(one.step, one.files): one.sequence for one in remote}
    found, last = [], -1
    for one in local:
        sequence = uploaded.pop((one.step, one.files), None)
        last = max(one.sequence, last + 1, -1 if sequence is None else sequence)
        found.append(Candidate(one, last, True, sequence is not None))
    found += [Candidate(one, one.sequence, False, True) for one in remote if (one.step, one.files) in uploaded]
    return sorted(found, key=lambda one: (one.sequence, one.is_local))


class Checkpoints:
    """The complete checkpoints of both places.

    Args:
        folder: the local folder.
        remote: where they are uploaded to; None: nowhere.

    Attributes:
        highest_sequence: of those that `complete` has found; -1: there was none.
    """

    def __init__(self, folder: CheckpointFolder, remote: RemoteFolder | None) -> None:
        self._folder, self._remote = folder, remote
        self.highest_sequence = -1

    @property
    def place(self) -> str:
        """Words for where they are."""
        return f"'{self._folder.path}'" + (f" or '{self._remote.url}'" if self._remote is not None else "")

    def complete(self) -> list[Candidate]:
        """Return them, the newest last.

        Raises:
            CorruptData: a manifest is damaged.
            FileNotFoundError, PermissionError, IoError: the store cannot be asked.
        """
        found = in_order(self._folder.complete(), [] if self._remote is None else self._remote.complete())
        self.highest_sequence = found[-1].sequence if found else -1
        return found

    def find(self, step: int | None) -> Candidate | None:
        """Return the newest one, or the newest one of a step.

        Returns:
            None if there is none, and no step was asked for.

        Raises:
            FileNotFoundError: there is none of that step.
            ValueError: the local folder is that of one step.
            CorruptData, PermissionError, IoError: as `complete`.
        """
        complete = self.complete()
        if not complete and is_step(self._folder.path):
            raise ValueError(step_in_words(self._folder.path))
        of_step = [one for one in complete if step is None or one.manifest.step == step]
        if step is not None and not of_step:
            steps = ", ".join(str(one.manifest.step) for one in complete) or "none"
            raise FileNotFoundError(f"{self.place} has no complete checkpoint of step {step}; there are: {steps}")
        return of_step[-1] if of_step else None

    def path_of(self, found: Candidate, replicas: Replicas) -> str:
        """Return the path or URL of a rank's file.

        Args:
            found: the checkpoint.
            replicas: of this rank.

        Raises:
            ValueError: it has files for another number of ranks.
            FileNotFoundError, CorruptData: the file does not exist, or has another size.
        """
        manifest, count = found.manifest, len(found.manifest.files)
        place = replicas.place_in(count)
        if place is None:
            who = f"{count} ranks" if count > 1 else "one rank"
            remedy = 'give replicas="auto" if all of them have the same state. To reshard, '
            raise ValueError(
                f"step {manifest.step} in {self.place} was saved by {who}, and {replicas.in_words}: "
                f"{remedy if count == 1 else ''}use torch.distributed.checkpoint with GDSStorageWriter to change that"
            )
        file = manifest.files[place]
        if found.is_local:
            return self._folder.check(manifest, file)
        assert self._remote is not None  # it is from there
        return self._remote.file(manifest.step, file.name)
