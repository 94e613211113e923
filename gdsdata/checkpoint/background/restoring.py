"""Which checkpoint is restored: the newest one of storage, of the store, and of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from gdsdata.checkpoint.background.checkpoint_folder import CheckpointFolder
from gdsdata.checkpoint.background.checkpoints import Candidate, Checkpoints
from gdsdata.checkpoint.background.copies import Held, InMemory, newest_in_memory
from gdsdata.checkpoint.background.peer_memory import CopiesInMemory
from gdsdata.checkpoint.background.ranks import Ranks
from gdsdata.checkpoint.background.replicas import Replicas
from gdsdata.errors import CorruptData
from gdsdata.io import engine

if TYPE_CHECKING:
    from gdsdata.collective.transfers import SharedReads

T = TypeVar("T")

Load = Callable[[str, "SharedReads | None"], T]
Together = Callable[[], contextlib.AbstractContextManager["SharedReads | None"]]


class Found(NamedTuple):
    """A checkpoint that is restored. One of the two is not None.

    Attributes:
        stored: where storage or the store has it, or an older one.
        in_memory: where memory has it; None: it is not read from there.
    """

    stored: Candidate | None
    in_memory: InMemory | None


@dataclass(frozen=True)
class Restored(Generic[T]):
    """A checkpoint that was read.

    Attributes:
        step: of the checkpoint.
        place: words for where it was.
        content: the content of this rank's file.
    """

    step: int
    place: str
    content: T


class Restoring:
    """Finds checkpoints and reads them, from memory if it has them.

    Args:
        folder: of the checkpoints.
        checkpoints: those of the folder and of the store.
        memory: copies in memory.
        ranks: all ranks.
        replicas: which of them have the same state.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        checkpoints: Checkpoints,
        memory: CopiesInMemory,
        ranks: Ranks,
        replicas: Replicas,
    ) -> None:
        self._folder, self._checkpoints, self._memory, self._ranks = folder, checkpoints, memory, ranks
        self._replicas = replicas

    def find(self, step: int | None, held: Sequence[Held]) -> Found | None:
        """Return the newest checkpoint, or the newest one of a step. On the first rank.

        Args:
            step: the step; None: any.
            held: the copies of each rank.

        Returns:
            None if there is none, and no step was asked for.

        Raises:
            FileNotFoundError, CorruptData, PermissionError, IoError: as `Checkpoints.find`.
        """
        self._memory.note(held)
        in_memory = newest_in_memory(held, self._folder.run_id(), step)
        try:
            stored = self._checkpoints.find(step)
        except FileNotFoundError:
            if in_memory is None:
                raise
            stored = None
        if stored is not None and in_memory is not None and not in_memory.is_newer(stored.manifest, stored.sequence):
            in_memory = None
        return None if stored is None and in_memory is None else Found(stored, in_memory)

    def read(self, found: Found, load: Load[T], together: Together) -> Restored[T]:
        """Read this rank's file. All ranks call it.

        If a copy in memory is damaged or lost, all read the checkpoint of storage instead.

        Args:
            found: the same on all ranks.
            load: reads a path or URL.
            together: has replicas read together in a block.

        Raises:
            Exception: whatever ``load`` raises, and as `Checkpoints.path_of`.
        """

        def read_stored(stored: Candidate) -> T:
            with together() as its:
                return load(self._checkpoints.path_of(stored, self._replicas), its)

        if found.in_memory is not None:
            restored = self._read_copy(found.in_memory, load, is_last=found.stored is None)
            if restored is not None:
                return restored
        self._memory.keep(None)
        assert found.stored is not None  # else the error was raised
        stored = found.stored
        content = self._ranks.mine(lambda: read_stored(stored))
        step = stored.manifest.step
        return Restored(step, f"step {step} in {self._checkpoints.place}", content)

    def _read_copy(self, chosen: InMemory, load: Load[T], is_last: bool) -> Restored[T] | None:
        """Read the copy of this rank's file.

        Args:
            chosen: the save.
            load: reads a path.
            is_last: storage has no checkpoint.

        Returns:
            None, with a warning: a rank could not read its copy.
        """
        read: list[T] = []

        def attempt() -> str | None:
            try:
                read.append(load(self._memory.fetch(chosen), None))
            except Exception as error:
                # Other copies would not suit the caller's state either.
                is_of_caller = isinstance(error, (ValueError, TypeError)) and not isinstance(error, CorruptData)
                if is_last or is_of_caller:
                    raise
                return f"{type(error).__name__}: {error}"
            return None

        said = self._ranks.each(attempt)
        step = chosen.generation.step
        failed = [f"rank {rank}: {error}" for rank, error in enumerate(said) if error is not None]
        if failed:
            engine.warn_once(f"step {step} could not be restored from memory, so storage is read ({failed[0]})")
            return None
        self._memory.keep(chosen.generation)
        return Restored(step, f"step {step} in memory", read[0])
