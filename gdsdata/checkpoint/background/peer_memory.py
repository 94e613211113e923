"""`PeerMemory`: the newest save in the memory of nodes, each rank's file on two of them.

Each rank copies its file into the memory of its node while it writes it. Then a thread sends it to
the rank's partner on another node. So a restart finds all files in memory, also if a node is lost.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from gdsdata.checkpoint.background.copies import Generation, Held, InMemory, Transfer, transfers_to_partners
from gdsdata.checkpoint.background.memory_folder import MemoryFolder
from gdsdata.checkpoint.background.memory_transfers import Transfers
from gdsdata.checkpoint.background.own_copy import NO_COPY, NoCopy, OwnCopy
from gdsdata.checkpoint.background.ranks import Ranks
from gdsdata.checkpoint.background.save_job import PIECES_AT_A_TIME
from gdsdata.checkpoint.background.sending import lower_priority
from gdsdata.checkpoint.threads import DaemonThreads
from gdsdata.collective.peers import Meeting, Peers
from gdsdata.errors import EngineClosed, RankLost
from gdsdata.io import engine

Outcome = Future[bool]  # whether all ranks have all copies of a save

_MOST_END_S = 5.0  # the thread's transfers are broken off at the end, which takes milliseconds


class CopiesInMemory(Protocol):
    """Keeps copies of saves in memory, or none. `PeerMemory` documents each method."""

    least_sequence: int

    def plan(self, step: int, sequence: int, number: str, run_id: Callable[[], str]) -> Generation | None: ...

    def keeping(
        self, generation: Generation | None, copied: Outcome
    ) -> contextlib.AbstractContextManager[OwnCopy | NoCopy]: ...

    def held(self) -> Held: ...

    def note(self, held: Sequence[Held]) -> None: ...

    def fetch(self, chosen: InMemory) -> str: ...

    def keep(self, generation: Generation | None) -> None: ...

    def wait(self) -> None: ...

    def close(self, waits: bool) -> None: ...


class NoPeerMemory:
    """Keeps no copies. The first save removes those that earlier processes have left.

    Args:
        folder: of the copies.
    """

    least_sequence = 0

    def __init__(self, folder: MemoryFolder) -> None:
        self._folder, self._is_free = folder, False

    def plan(self, step: int, sequence: int, number: str, run_id: Callable[[], str]) -> None:
        return None

    @contextlib.contextmanager
    def keeping(self, generation: Generation | None, copied: Outcome) -> Iterator[NoCopy]:
        if not self._is_free:
            self._folder.free()
            self._is_free = True
        set_outcome(copied, False)
        yield NO_COPY

    def held(self) -> Held:
        return Held("", ())

    def note(self, held: Sequence[Held]) -> None:
        pass

    def fetch(self, chosen: InMemory) -> str:
        raise EngineClosed("there are no copies in memory")

    def keep(self, generation: Generation | None) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self, waits: bool) -> None:
        pass


class _Offer(NamedTuple):
    """The own copy of a rank, as it says.

    Attributes:
        place: of its memory.
        size_bytes: of the copy.
        error: why there is none; None: it is complete.
    """

    place: str
    size_bytes: int
    error: str | None


class PeerMemory:
    """Keeps the newest save in memory: each rank's file on its own node, and on its partner's.

    The first rank decides whether a save gets copies: not while those of an earlier one are sent.
    So memory has at most two generations: that which is complete, and that which replaces it.

    It owns the threads that copy and send, which end with the program. All ranks construct it
    together.

    Args:
        folder: of the copies on this node.
        ranks: all ranks.
        timeout_s: how long ranks wait for one another. If one is lost, there are no more copies.

    Attributes:
        least_sequence: the sequence of the next save is not lower.
    """

    def __init__(self, folder: MemoryFolder, ranks: Ranks, timeout_s: float) -> None:
        self._folder, self._rank, self._count = folder, ranks.rank, ranks.count
        self._is_stopped = threading.Event()
        self._meeting: Meeting | None = None
        if self._count > 1:
            peers = Peers(ranks.members, "keep copies of checkpoints for one another")
            is_stopped = self._is_stopped
            self._meeting = peers.meet(lambda: not is_stopped.is_set(), timedelta(seconds=timeout_s))
        self._thread = DaemonThreads(1, "gdsdata-send")
        self._copiers = DaemonThreads(PIECES_AT_A_TIME, "gdsdata-copy")
        self._end = weakref.finalize(self, _end, self._is_stopped, self._meeting, self._thread, os.getpid())
        self._kept: Generation | None = None  # the complete one; all ranks have the same
        self._is_busy = False  # the thread has a generation
        self._is_lost = False  # no more copies: a rank is gone
        self._warned: set[str] = set()
        self.least_sequence = 0

    # --- in the thread that saves -------------------------------------------------------------------------------------

    def plan(self, step: int, sequence: int, number: str, run_id: Callable[[], str]) -> Generation | None:
        """Return the generation that a save becomes. On the first rank.

        Args:
            step, sequence, number: of the save (see `Generation`).
            run_id: returns the random name of the checkpoint folder, or raises that it has none.

        Returns:
            None: it gets no copies.
        """
        if self._is_lost:
            return None
        if self._is_busy:
            self._warn("busy", "saves come faster than ranks send their copies, so memory keeps some of them only")
            return None
        generation = Generation(sequence, step, self._count, number, run_id())
        self._is_busy, self.least_sequence = True, sequence + 1
        return generation

    @contextlib.contextmanager
    def keeping(self, generation: Generation | None, copied: Outcome) -> Iterator[OwnCopy | NoCopy]:
        """Return a context that copies what this rank writes, and has it sent at its end.

        Args:
            generation: from `plan`; None: there are no copies.
            copied: gets the outcome. No error of the copies is raised.
        """
        if generation is None:
            set_outcome(copied, False)
            yield NO_COPY
            return
        own = OwnCopy(self._folder, generation, self._kept, self._rank, self._copiers)
        failed: list[BaseException] = []
        try:
            yield own
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            self._thread.submit(lambda: self._share(own, failed[0] if failed else None, copied))

    # --- in the thread that restores ----------------------------------------------------------------------------------

    def held(self) -> Held:
        """Return the copies in this node's memory; none, with a warning, if it cannot be used."""
        try:
            return self._folder.held()
        except OSError as error:
            engine.warn_once(f"no copies in memory are used: {error}")
            return Held("", ())

    def note(self, held: Sequence[Held]) -> None:
        """Have later saves be newer than all of these."""
        known = [copy.generation.sequence for one in held for copy in one.copies]
        self.least_sequence = max([self.least_sequence, *(sequence + 1 for sequence in known)])

    def keep(self, generation: Generation | None) -> None:
        """Keep a generation until a newer one is complete. All ranks call it.

        The next save removes all others. None: those of all generations.
        """
        self._kept = generation
        self._folder.release()
        if generation is not None:
            with contextlib.suppress(OSError):  # the next save reports it
                self._folder.hold(generation)

    def fetch(self, chosen: InMemory) -> str:
        """Send and get the files that ranks do not have. All ranks call it.

        Returns:
            The path of this rank's file.

        Raises:
            RankLost: a rank is gone.
            OSError: a file cannot be sent, or there is no room for it.
        """
        with contextlib.suppress(OSError):  # a file that cannot be read says why
            self._folder.hold(chosen.generation)
        if chosen.transfers:
            if self._is_stopped.is_set():
                raise EngineClosed("copies in memory are sent by an AsyncCheckpointer that is open")
            self._thread.submit(lambda: self._fetch(chosen)).result()
        return self._folder.file(chosen.generation, self._rank)

    def wait(self) -> None:
        """Wait until the copies in progress are complete, or have failed."""
        if not self._is_stopped.is_set():
            self._thread.submit(lambda: None).result()

    def close(self, waits: bool) -> None:
        """End the thread. Complete copies stay in memory, and are not held. May be called again.

        Args:
            waits: complete the copies in progress first.
        """
        if waits:
            self.wait()
        self._end()
        self._thread.close()
        self._copiers.close()
        self._folder.release()

    # --- in the thread that sends -------------------------------------------------------------------------------------

    def _share(self, own: OwnCopy, failed: BaseException | None, copied: Outcome) -> None:
        """Complete this rank's copy, send it to the partner, and take that of another rank.

        Args:
            own: the copy.
            failed: the error of the save; None: the file is on storage.
            copied: gets the outcome.
        """
        lower_priority()
        is_copied = False
        try:
            own.end(failed)
            if not self._is_lost:
                is_copied = self._shared(own, failed is None)
        except Exception as error:
            self._lose(error)
        finally:
            self._is_busy = False
            set_outcome(copied, is_copied)

    def _shared(self, own: OwnCopy, is_saved: bool) -> bool:
        generation = own.generation
        offers = self._gathered(self._offer_of(own))
        failed = [f"rank {rank}: {one.error}" for rank, one in enumerate(offers) if one.error is not None]
        if failed:
            self._folder.remove(generation, self._rank)
            if is_saved:
                self._report("own", f"step {generation.step} is not kept in memory ({failed[0]}); its save goes on")
            return False
        transfers = transfers_to_partners([one.place for one in offers], [one.size_bytes for one in offers])
        errors = self._transferred(generation, transfers)
        if errors:
            self._report("partner", f"not all partners have a copy of step {generation.step} in memory ({errors[0]})")
        self._kept = generation
        self._folder.keep_only(generation)
        self._gathered(None)  # when all have removed the older one, the first rank may plan the next one
        return not errors

    def _offer_of(self, own: OwnCopy) -> _Offer:
        try:
            return _Offer(self._folder.make(), own.size_bytes, own.error)
        except OSError as error:
            return _Offer("", 0, own.error or str(error))

    def _fetch(self, chosen: InMemory) -> None:
        if self._is_lost:
            raise RankLost("a rank that has copies of checkpoints in memory is gone")
        try:
            errors = self._transferred(chosen.generation, chosen.transfers)
        except Exception as error:
            self._lose(error)
            raise
        if errors:
            raise OSError(errors[0])

    def _transferred(self, generation: Generation, transfers: Sequence[Transfer]) -> list[str]:
        """Carry out transfers. All ranks call it.

        Returns:
            Why some of them failed, the same on all ranks.
        """
        if not transfers or self._meeting is None:
            return []
        prepared = Transfers(self._folder, generation, transfers, self._rank)
        try:
            prepared.refuse(self._gathered(prepared.open()))
            self._meeting.pass_on(prepared.sends, prepared.receives)
            prepared.complete(self._gathered(prepared.checksums()))
            errors = self._gathered(prepared.errors)
        finally:
            prepared.close()
        words = {number: error for one in errors for number, error in one.items()}
        return [f"rank {transfers[number].destination}: {words[number]}" for number in sorted(words)]

    def _gathered(self, value: Any) -> list[Any]:
        if self._meeting is None:
            return [value]
        return [pickle.loads(one) for one in self._meeting.contents(pickle.dumps(value))]

    def _lose(self, error: Exception) -> None:
        """Make no more copies: the ranks are not in step any more."""
        self._is_lost = True
        if self._meeting is not None:
            self._meeting.close()
        if not self._is_stopped.is_set():
            self._warn("lost", f"no more checkpoints are kept in memory by this process: {error!r}")

    def _report(self, kind: str, message: str) -> None:
        """Warn on the first rank of what all ranks know."""
        if self._rank == 0:
            self._warn(kind, message)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            engine.warn_once(message)


def _end(is_stopped: threading.Event, meeting: Meeting | None, thread: DaemonThreads, process: int) -> None:
    """Have the thread that sends leave what it does.

    It must not be in torch's code when Python ends it: that aborts the process.
    """
    if os.getpid() != process:  # a forked child has neither the thread nor the connections
        return
    is_stopped.set()
    if meeting is not None:
        meeting.break_off()
    wait([thread.submit(lambda: None)], _MOST_END_S)


def set_outcome(copied: Outcome, is_copied: bool) -> None:
    """Set whether all ranks have all copies of a save, unless it is known already."""
    with contextlib.suppress(InvalidStateError):
        copied.set_result(is_copied)
