"""`PartsAhead`: a thread that reads this process's parts of batches, and agrees with its peers.

They exchange how large the parts are, and errors, so that all of them gather the same batches.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gdsdata.collective.peers import Meeting, NcclGathers, Peers
from gdsdata.collective.shared_errors import words_of_values
from gdsdata.data.batches.reader import Reader
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.batches.shared_layout import Gathered, Layout, Part
from gdsdata.data.batches.skipped import NothingLeft
from gdsdata.errors import ITERATOR_CLOSED, EngineClosed, RankLost
from gdsdata.io.program_end import stop_at_exit

# When this is closed, the thread notifies the peers, which may take so long; when the program ends,
# less.
_NOTIFY_S, _NOTIFY_AT_EXIT_S = 5.0, 1.0


class _Kind(enum.IntEnum):
    """The kind of a header, which a peer sends for each batch."""

    THERE = 0  # its part of the batch is in memory
    ERROR = 1  # it cannot read its part
    NOTHING = 2  # all samples of its part are bad, and were left out
    LEFT = 3  # it takes no more batches


# A header has the kind, a checksum of the batch's sample ids, the samples of the part, and how many
# batches the peer has taken. Then come the rows of each sample, for each ragged field.
_HEADER = 4


class Planned(NamedTuple):
    """A batch that was planned.

    Attributes:
        samples: in all of it.
        mine: samples of this process's part.
        most_samples: of a part.
        check: a checksum of the sample ids of all of it.
    """

    samples: int
    mine: int
    most_samples: int
    check: int


class Agreed(NamedTuple):
    """A batch whose parts are all in memory.

    Attributes:
        gathered: how large they are.
        parts: this process's tensors, with all of their room.
        is_ready: on a GPU, the event behind them.
    """

    gathered: Gathered
    parts: list[torch.Tensor]
    is_ready: torch.cuda.Event | None


class PartsAhead:
    """Takes parts of batches from a reader, as many ahead as that reader does itself.

    The consumer's thread calls its methods. It is not used any more when `close` has been called.

    Args:
        inner: reads this process's parts.
        peers: that read together.
        settings: of the whole batches.
        call: what must not differ between the peers, by name.
        stream: on a GPU, of the parts.
        abort: called by the thread when a peer is lost: batches that are being gathered may never
            be whole.
        at_end: called by the thread when this is closed. It waits for the batches that are being
            gathered while its argument, a function, returns True.

    Attributes:
        error: behind the batches that are agreed on; None: there is none yet.
        is_lost: an error means that batches that are being gathered may not be whole.
        layout: of the batches, when there are any.
        is_new_communicator: a peer has no communicator to gather by.
    """

    def __init__(
        self,
        inner: Reader[Any],
        peers: Peers,
        settings: BatchSettings,
        call: Mapping[str, object],
        stream: torch.cuda.Stream | None,
        abort: Callable[[], None],
        at_end: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._inner, self._peers, self._call, self._stream = inner, peers, dict(call), stream
        self._device, self._most_ahead = settings.device, settings.prefetch
        self._most_samples = -(-settings.batch_size // peers.count)  # of a part
        self._abort, self._at_end = abort, at_end
        # Guards _planned, _agreed, error, is_lost, _taken, _taken_by_all and _wanted_until.
        self._changed = threading.Condition()
        self._planned: deque[Planned] = deque()
        self._agreed: deque[Agreed] = deque()
        self.error: Exception | None = None
        self.is_lost = False
        self._taken, self._taken_by_all = 0, sys.maxsize  # batches, and those that all peers take
        self._wanted_until = math.inf  # closed if it is finite
        self._inner_in_use = threading.Lock()  # held by the thread while it takes a part
        self._process = os.getpid()
        self._meeting: Meeting | None = None
        self.layout: Layout | None = None
        self.is_new_communicator = False
        self.stalls, self.stall_s = 0, 0.0

    def begin(self) -> Meeting:
        """Begin the thread, if that was not done yet, and return its meeting with the peers.

        Raises:
            EngineClosed: this is a forked child of the process that made the iterator.
        """
        if self._is_forked:
            raise EngineClosed("an iterator with share_reads=True does not work in a forked child of its process")
        if self._meeting is None:
            self._meeting = self._peers.meet(lambda: time.monotonic() < self._wanted_until)
            threading.Thread(target=self._run, args=(self._meeting,), name="gdsdata-share").start()
            stop_at_exit(self)
        return self._meeting

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child: it has no thread, and its locks may be held forever."""
        return os.getpid() != self._process

    @property
    def is_closed(self) -> bool:
        return self._wanted_until < math.inf

    @property
    def ready(self) -> int:
        """Batches that are agreed on, and not taken."""
        return len(self._agreed)

    def plan(self, batches: Iterable[Planned]) -> None:
        """Note batches whose parts were planned."""
        with self._changed:
            self._planned.extend(batches)
            self._changed.notify_all()

    def take(self) -> Agreed | None:
        """Wait for the next planned batch, and return it.

        None: it does not come, because of ``error``, or this is closed.
        """
        with self._changed:
            if not self._is_settled():
                began = time.monotonic()
                self._changed.wait_for(self._is_settled)
                self.stalls += 1
                self.stall_s += time.monotonic() - began
            if self.is_closed or self.is_lost or not self._agreed or self._taken >= self._taken_by_all:
                return None
            self._taken += 1
            self._changed.notify_all()  # the thread may take another part
            return self._agreed.popleft()

    def undo_take(self) -> None:
        """Note that this process does not gather the batch that it has taken last."""
        with self._changed:
            self._taken -= 1

    def _is_settled(self) -> bool:
        return bool(self._agreed) or self.error is not None or self.is_closed

    def stop(self) -> None:
        """End the thread, because the program ends. Does not wait."""
        if not self._is_forked:
            self._stop(_NOTIFY_AT_EXIT_S)

    def _stop(self, notify_s: float) -> None:
        with self._changed:
            self._wanted_until = min(self._wanted_until, time.monotonic() + notify_s)
            self._changed.notify_all()
        self._inner.stop()

    def close(self) -> None:
        """Close the reader. The thread notifies the peers by itself.

        In a forked child it does nothing: the parent uses the reader and the connections.
        """
        if self._is_forked:
            return
        self._stop(_NOTIFY_S)
        with self._inner_in_use:
            self._inner.close()

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self, meeting: Meeting) -> None:
        """Agree on each planned batch, until one of them fails or this is closed."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        try:
            try:
                while (planned := self._next_planned()) is not None:
                    agreed = self._agree(meeting, planned)
                    with self._changed:
                        self._agreed.append(agreed)
                        self._changed.notify_all()
            except EngineClosed:
                if not self.is_closed:
                    raise
            self._notify_peers(meeting)
        except _PeerLeft:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            meeting.close()
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed)
            self._at_end(lambda: time.monotonic() < self._wanted_until)

    def _next_planned(self) -> Planned | None:
        """Wait for a batch that is planned, and for room; None if this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or (self._planned and len(self._agreed) < self._most_ahead))
            return None if self.is_closed else self._planned.popleft()

    def _agree(self, meeting: Meeting, planned: Planned) -> Agreed:
        """Read this process's part of a batch, and exchange how large the parts are.

        Raises:
            Exception: a peer could not read its part. It is the same on all peers.
            RankLost: a peer has ended, or is silent for too long.
            _PeerLeft: a peer takes no more batches.
        """
        batch, error = self._part_of(planned)
        if self.layout is None:
            self.layout = self._agreed_layout(meeting, batch)
        layout, part = self.layout, self.layout.empty_part(self._device)
        if batch is not None:
            try:
                part = layout.part_of(batch)
            except (TypeError, ValueError) as differs:
                error = differs
        kind = _Kind.THERE if error is None else _Kind.NOTHING if isinstance(error, NothingLeft) else _Kind.ERROR
        headers = self._headers(meeting, kind, planned.check, part)
        kinds, samples = headers[:, 0], headers[:, 2]
        if (kinds == _Kind.ERROR).any():
            raise meeting.error(error)
        if (headers[:, 1] != planned.check).any():
            raise ValueError(
                f"{meeting.peers.in_words} read each batch together, and are at different batches. Have all of them "
                "load the same state, and take the same batches"
            )
        if not samples.any():
            of_all = NothingLeft.of(planned.samples, error.last_error) if isinstance(error, NothingLeft) else None
            raise meeting.error(of_all)
        rows = headers[:, _HEADER:].reshape(self._peers.count, layout.ragged_leaves, self._most_samples)
        gathered = Gathered(layout, samples, rows, planned.most_samples)
        parts = gathered.padded(part)
        is_ready = None if self._stream is None else self._stream.record_event()
        return Agreed(gathered, parts, is_ready)

    def _part_of(self, planned: Planned) -> tuple[Any, Exception | None]:
        """Take this process's part, None if it has none, or the error of it."""
        if not planned.mine:
            return None, None
        try:
            with self._inner_in_use:
                if self.is_closed:
                    raise EngineClosed(ITERATOR_CLOSED)
                return self._inner.next(), None
        except Exception as error:
            if self.is_closed:
                raise EngineClosed(ITERATOR_CLOSED) from error
            return None, error

    def _agreed_layout(self, meeting: Meeting, batch: Any) -> Layout:
        """Return what the batches' tensors are, and compare the calls that the peers have made.

        A peer without a part of the first batch does not know it.
        """
        layout = None
        if batch is not None:
            with contextlib.suppress(TypeError):  # it is raised when the part is made
                layout = Layout.of(batch)
        has_communicator = self._device.type == "cuda" and NcclGathers.has_group(self._peers)
        said = self._contents(meeting, pickle.dumps((self._call, has_communicator, layout)))
        calls, communicators, layouts = zip(*map(pickle.loads, said), strict=True)
        if words := words_of_values(calls):
            raise ValueError(f"{meeting.peers.in_words} read each batch together, and differ: {words}")
        self.is_new_communicator = not all(communicators)
        known = [one for one in layouts if one is not None]
        if any(one != known[0] for one in known):
            words = words_of_values([{"batches": one} for one in layouts])
            raise ValueError(f"{meeting.peers.in_words} read each batch together, and differ: {words}")
        return known[0] if known else Layout(())

    def _contents(self, meeting: Meeting, mine: bytes) -> list[bytes]:
        """Exchange bytes before the layout is known. A peer that takes no more batches has none."""
        found = meeting.contents(mine)
        self._note_departed([_Kind.THERE if one else _Kind.LEFT for one in found], [0] * len(found))
        return found

    def _headers(self, meeting: Meeting, kind: _Kind, check: int, part: Part) -> np.ndarray:
        """Exchange headers: int64, a row of each peer."""
        rows = np.zeros((len(part.rows), self._most_samples), np.int64)
        rows[:, : part.samples] = part.rows
        # When this process has left, it takes no more, so the peers may rely on the number.
        found = meeting.numbers(np.concatenate([[kind, check, part.samples, self._taken], rows.ravel()]))
        self._note_departed(found[:, 0].tolist(), found[:, 3].tolist())
        return found

    def _note_departed(self, kinds: list[int], taken: list[int]) -> None:
        """Note which peers take no more batches.

        Args:
            kinds: of the headers of all peers.
            taken: how many batches each of them has taken.

        Raises:
            _PeerLeft: there are any.
        """
        left = [place for place, kind in enumerate(kinds) if kind == _Kind.LEFT]
        if not left:
            return
        with self._changed:
            self._taken_by_all = min(taken[place] for place in left)
            is_stuck = self._taken > self._taken_by_all
        self._fail(self._peers.left(left), is_stuck)
        raise _PeerLeft

    def _fail(self, error: Exception, is_lost: bool | None = None) -> None:
        """Have the consumer raise an error."""
        is_lost = isinstance(error, RankLost) if is_lost is None else is_lost
        with self._changed:
            self.error, self.is_lost = error, is_lost
            self._changed.notify_all()
        if is_lost:
            self._abort()

    def _notify_peers(self, meeting: Meeting) -> None:
        """Notify the peers that this one takes no more batches."""
        if self.layout is None:
            self._contents(meeting, b"")
        else:
            self._headers(meeting, _Kind.LEFT, 0, self.layout.empty_part(self._device))


class _PeerLeft(Exception):
    """A peer takes no more batches, and the thread has noted that."""
