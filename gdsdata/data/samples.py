"""`Samples`: samples of files, their order for a share, and the batches' source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from gdsdata.data import arguments
from gdsdata.data.batches.reader import Reader
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.batches.source import BatchSource, RingSource, begun_engine
from gdsdata.data.indexing import Indexing
from gdsdata.data.order import choice
from gdsdata.data.order.epoch import Epoch, part_of_step
from gdsdata.data.order.permutation import Order
from gdsdata.data.progress import Progress
from gdsdata.data.ranks import Ranks, Share
from gdsdata.data.split import Split, part_of
from gdsdata.errors import CorruptData
from gdsdata.formats.index import Format, Index, SampleIndex
from gdsdata.io import budget
from gdsdata.io.engine import Engine
from gdsdata.io.options import EngineOptions

_UNCHECKED_BYTES = 1 << 30  # less is not compared with the available memory, which takes 0.1 ms to find out
# Modules that only some data sets need are imported by these: a program pays for what it uses.
if TYPE_CHECKING:
    from gdsdata.collective.peers import Peers
    from gdsdata.data.order.lanes import Lanes
    from gdsdata.data.order.row_groups import RowGroups, RowGroupShuffle
    from gdsdata.formats.fields import FieldIndex
    from gdsdata.formats.tables import TableIndex
    from gdsdata.formats.windows import WindowIndex


class Samples:
    """The index of some files' samples, their order, and the source of their batches.

    Files are indexed when it is made. After `forget_index` they are indexed again when that is
    needed.

    Args:
        indexing: finds and indexes the files.
        split: the part of the samples that is used. The files of its name are those of
            ``indexing`` already.
        shuffle, seed, drop_last, uneven: as of `GDSDataset`.
        ranks: where rank and world size come from.
        settings: of the batches.
        progress: shared with the workers of a DataLoader, which index changed files anew together.
        peers: processes that get the same batches, and read them together; None: this one reads
            them alone.

    Attributes:
        order: of an epoch's samples.
        shuffle: that ``order`` has: ``"auto"`` is resolved.
        source: makes the readers of epochs.
        share: of each step that is this process's.

    Raises:
        CorruptData: a file is not what its header or size says.
        ValueError: the files have no samples, or an argument does not fit them.
    """

    order: Order
    source: BatchSource[Any]
    paths: Sequence[str]
    format: Format
    shuffle: bool | Lanes | RowGroupShuffle
    _index: SampleIndex | None
    _data_identity: dict[str, Any] | None

    def __init__(
        self,
        indexing: Indexing,
        split: Split,
        shuffle: bool | str | Lanes | RowGroups,
        seed: int,
        drop_last: bool,
        uneven: str,
        ranks: Ranks,
        settings: BatchSettings,
        progress: Progress,
        peers: Peers | None = None,
    ) -> None:
        self._peers, self._progress, self._changes = peers, progress, progress.changes
        self._indexing, self.settings = indexing, settings
        self._split, self._ranks = split, ranks
        self._seed, self._drop_last, self._uneven = seed, drop_last, uneven
        self._checked_in = 0  # the process in which `check_memory` has found enough
        self._choice = choice.ShuffleChoice(shuffle)
        self._data_of_all: dict[str, Any] | None = None  # with several ranks, once their files have changed
        self.share = ranks.found_or_none() or Share(0, 1)
        self._index_files()

    def __len__(self) -> int:
        """Return the number of samples, before they are shared among ranks."""
        return len(self.index)

    @property
    def index(self) -> SampleIndex:
        """Where the samples lie."""
        if self._index is None:
            return self._index_files()
        return self._index

    def forget_index(self) -> None:
        """Index the files again when that is needed: they have changed."""
        self._progress.note_change()
        self._follow_changes()

    def _follow_changes(self) -> None:
        if self._progress.changes != self._changes:
            self._changes = self._progress.changes
            if self._index is not None and self.share.world_size > 1:
                self._data_of_all = self.identity_of_data()
            self._index = None
            self._indexing.forget()

    def forget_changed(self) -> None:
        """Index the files again if samples were left out because a file has changed.

        Not with several ranks, which would have different indices.
        """
        skipped, is_alone = self.settings.skipped, self.share.world_size == 1 and self._peers is None
        if skipped is not None and skipped.has_changed_files and is_alone:
            self.forget_index()

    @property
    def step_samples(self) -> int:
        """Samples in a step of all ranks."""
        return self.settings.batch_size * self.share.world_size

    def epoch(self, number: int) -> Epoch:
        """Return an epoch of this process: of its share, or of its part of that."""
        place, peers = (0, 1) if self._peers is None else (self._peers.place, self._peers.count)
        part = part_of_step(self.step_samples, self.share, place, peers)
        return Epoch(self.shuffle, len(self.index), self.step_samples, part, self._seed, number)

    def reader(self, number: int, owner: object) -> Reader[Any]:
        """Return what reads an epoch's batches.

        Args:
            number: of the epoch.
            owner: as of `BatchSource.reader`.
        """
        epoch, peers = self.epoch(number), self._peers
        if peers is None:
            return self.source.reader(epoch, owner)
        from gdsdata.data.batches.shared import SharedReader
        from gdsdata.data.identity import compared

        data = compared(self.identity_of_data())
        call = {**self.identity(), **data, "epoch": number, "batch_size": self.settings.batch_size}
        inner = self.source.reader(epoch, owner)
        return SharedReader(inner, peers, self.settings.but(batch_size=self.order.largest_batch), call)

    def check_memory(self, batches: int) -> None:
        """Refuse batches in flight that need more memory than there is, before any is taken.

        This is done once in a process: later epochs use the memory of the first one.

        Args:
            batches: of an epoch, that are read.

        Raises:
            MemoryError: they need more.
        """
        if self._checked_in == os.getpid():
            return
        in_flight, sample_bytes = min(batches, self.settings.prefetch), self.source.least_sample_bytes
        samples = min(in_flight * self._batch_samples, len(self.index) // self.share.world_size + 1)
        needed_bytes = samples * sample_bytes
        if needed_bytes >= _UNCHECKED_BYTES and needed_bytes > (available_bytes := budget.available_bytes()):
            raise MemoryError(
                f"batch_size={self.settings.batch_size}: {in_flight} batches in flight take at least "
                f"{needed_bytes} bytes of host memory, and {available_bytes} bytes are available: use a "
                f"smaller batch_size ({sample_bytes} bytes a sample), or a smaller prefetch"
            )
        self._checked_in = os.getpid()

    def ring_bytes(self, number: int, reader: Reader[Any] | None) -> int:
        """Return the memory of batches in flight or ready, at most, and of row groups.

        Args:
            number: of the epoch that is read, or would be.
            reader: that reads it, if one does.
        """
        ring_bytes = self.source.ring_bytes(self.epoch(number), len(self.order), reader)
        if self._peers is None:
            return ring_bytes
        part_bytes, batch_bytes = map(self.index.most_bytes, (self._batch_samples, self.order.largest_batch))
        return ring_bytes + self.settings.prefetch * part_bytes + 2 * batch_bytes

    def take_up(self, share: Share) -> int:
        """Use this share from now on.

        Returns:
            Its batches in an epoch.

        Raises:
            ValueError: the data make no batch for each of so many ranks.
        """
        self._follow_changes()
        if self._index is None:
            self._index_files()
        if share != self.share:
            before, self.share = self.share, share
            try:
                self._reorder()
            except ValueError:
                self.share = before
                raise
        return len(self.order)

    def agree_on_shuffle(self) -> None:
        """Choose what ``shuffle="auto"`` means. All ranks call it when iteration begins."""
        if self._choice.agree(self.index, self.share.world_size, self._ranks.are_given):
            self._reorder()

    @property
    def shuffle_name(self) -> str:
        """The shuffle as `GDSDataset.stats` names it."""
        if isinstance(self.shuffle, bool):
            return "uniform" if self.shuffle else "none"
        return str(self.shuffle)

    @property
    def shuffle_reason(self) -> str:
        """Why it is this one."""
        return self._choice.reason

    # ------------------------------------------------------------------------------------------------------- states

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for the same positions to mean the same samples."""
        return {
            "samples": len(self.index),
            "shuffle": choice.identity_of(self.shuffle),
            "seed": self._seed,
            "drop_last": self._drop_last,
            "uneven": self._uneven,
            "samples_per_step": self.step_samples,
        }

    def identity_of_data(self) -> dict[str, Any]:
        """Return what tells these data from others. The first call reads the index."""
        if self._data_identity is None or self._index is None:
            from gdsdata.data.identity import identity_of

            self._data_identity = identity_of(self.index, self.format, self._split)
        return self._data_identity

    def take_order_of(self, state: Mapping[str, Any]) -> None:
        """Use the share and the shuffle that a state of `GDSDataset` needs.

        Raises:
            ValueError: the state is of other data, another order, or another product of batch and
                world size. The share is then as before.
        """
        before = self.share
        self.take_up(self._ranks.of_state(state, self.settings.batch_size))
        identity = self.identity()
        if self._choice.is_auto:
            identity["shuffle"] = state.get("shuffle")
        from gdsdata.data.identity import refuse_other

        try:
            refuse_other(state, {**identity, "data": self.identity_of_data()})
        except ValueError:
            self.take_up(before)
            raise
        if self._choice.is_auto:
            self._choice.load(state["shuffle"])
            self._reorder()

    # ----------------------------------------------------------------------------------------------------- its parts

    def _index_files(self) -> SampleIndex:
        begun: Engine | None = None

        def begin(format: Format, path: str) -> None:
            nonlocal begun
            begun = self._begun_engine(format, path)

        index = self._indexed(begin)
        self._refuse_own_data(index)
        self._index, self._data_identity = index, None
        self._choice.begin(index, self.share.world_size, self._ranks.are_given)
        self._make_order()
        self._make_source()
        if begun is not None:
            self.source.open()  # it has the engine from now on
        return index

    def _refuse_own_data(self, index: SampleIndex) -> None:
        """Refuse files that changed while other ranks may still use the old index.

        Raises:
            CorruptData: samples do not lie where they did.
        """
        if self._data_of_all is None:
            return
        from gdsdata.data.identity import differences, identity_of

        if said := differences(self._data_of_all, identity_of(index, self.format, self._split)):
            raise CorruptData(
                f"the data set of '{self.paths[0]}' has changed: {'; '.join(said)}. Rank {self.share.rank} of "
                f"{self.share.world_size} has noticed it, and others may not have: make the data set again on all ranks"
            )

    def _begun_engine(self, format: Format, path: str) -> Engine | None:
        """Return a GPU's engine, which pins its memory while files like ``path`` are indexed."""
        settings = self.settings
        if settings.device.type != "cuda" or get_worker_info() or getattr(format, "decoded_on_cpu", False):
            return None
        return begun_engine(path, settings.options, settings.device)

    def _indexed(self, on_format: Callable[[Format, str], object]) -> SampleIndex:
        if self.settings.remote is not None:
            self.settings.remote.take_effect()
        self.paths, self.format, index = self._indexing.indexed(on_format)
        if not len(index):
            raise ValueError(f"no samples in {self.paths[0]} (of {len(self.paths)} files)")
        arguments.check_index(index, self.format, self.settings.collate, self.settings.decode)
        return part_of(index, self._split, self.paths[0])

    def _reorder(self) -> None:
        self._make_order()
        settings = self.source.settings
        if (settings.options, settings.batch_size) != (self._batch_options, self._batch_samples):
            self._make_source()

    def _make_order(self) -> None:
        shuffle = self._choice.shape(self.index, self.step_samples)
        self.order = Order(
            len(self.index),
            self.settings.batch_size,
            shuffle,
            self._seed,
            self._drop_last,
            *self.share,
            self._uneven,
        )
        self.shuffle = shuffle

    def _make_source(self) -> None:
        settings = self.settings.but(options=self._batch_options, batch_size=self._batch_samples)
        if self._peers is not None:  # whole batches are made of the gathered parts
            settings = settings.but(ragged="flat", zero_copy=False)
        self.source = self.index.read_by(_Sources(settings))

    @property
    def _batch_samples(self) -> int:
        """Samples of a batch that this process reads, at most."""
        peers = 1 if self._peers is None else self._peers.count
        return -(-self.order.largest_batch // peers)

    @property
    def _batch_options(self) -> EngineOptions:
        """Options of the engine that makes batches.

        Batches of a lane shuffle come from memory, so ``direct="always"`` is for their pieces.
        """
        options = self.settings.options
        if choice.is_lanes(self.shuffle) and options.direct == "always":
            return replace(options, direct="auto")
        return options


class _Sources:
    """Makes the source for an index: what `SampleIndex.read_by` takes.

    Args:
        settings: of the batches.
    """

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings

    def of_one_size(self, index: Index) -> BatchSource[Any]:
        return RingSource(index, self._settings)

    def of_fields(self, index: FieldIndex) -> BatchSource[Any]:
        from gdsdata.data.batches.ahead_sources import FieldSource

        return FieldSource(index, self._settings)

    def of_windows(self, index: WindowIndex) -> BatchSource[Any]:
        from gdsdata.data.batches.ahead_sources import WindowSource

        return WindowSource(index, self._settings)

    def of_row_groups(self, index: TableIndex) -> BatchSource[Any]:
        from gdsdata.data.batches.ahead_sources import TableSource

        return TableSource(index, self._settings)
