"""`GDSDataset`: an IterableDataset whose batches the engine reads ahead, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import index as index_of
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from gdsdata.data import arguments
from gdsdata.data.batch_dataset import BatchDataset, warn_of_stacking
from gdsdata.data.batches.reader import Reader
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.batches.source import BatchSource, Sources
from gdsdata.data.counts import ADDED, sum_of, sum_of_routes
from gdsdata.data.order import choice
from gdsdata.data.order.epoch import Epoch
from gdsdata.data.order.permutation import Order
from gdsdata.data.progress import Begun, Progress
from gdsdata.data.ranks import EpochRanks, Ranks, Share
from gdsdata.data.split import checked_split, part_of
from gdsdata.errors import GdsdataError, StallError
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.registry import Source, list_files, recognise
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions
from gdsdata.io.program_end import Ending, end_at_exit, is_ending_daemon
from gdsdata.observe.report import Report, Reporter, StepTimes, WorkerTimes, diagnose, marked

# What only some data sets need is imported where they need it, for a program's start: docs/design-decisions.md.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gdsdata.data.batches.ragged import RaggedAs
    from gdsdata.data.batches.settings import Collate
    from gdsdata.data.order.lanes import Lanes
    from gdsdata.data.order.row_groups import RowGroups
    from gdsdata.decoders import Decoder, Image

# Samples planned at a time, when an epoch is under way: numpy's cost a call is then spread over many batches.
_PLAN_SAMPLES = 4096


class GDSDataset(BatchDataset):
    """Batches of samples from files, read ahead by the engine.

    Iterating gives one epoch of batches; each is a tensor of shape ``(B, *sample shape)`` (see the formats for shapes
    and dtypes), of samples with fields a dict of them by the fields' names, or what ``transform`` makes of it. It is
    yours for as long as you keep it. Use it in place of a DataLoader, or inside one as ``DataLoader(dataset,
    batch_size=None)``; torchdata's StatefulDataLoader works too.

    An epoch is over when its last batch is handed out: the next iterator begins the next one, with a new order. An
    epoch broken off starts again from its first batch (see ``on_break``); `state_dict` and `load_state_dict` continue
    it, in another process too.

    Inside a DataLoader with W workers, worker w reads batches w, w + W, w + 2 W and so on, so that the loader's order
    is the same as without; on the CPU only, and slower than without: the engine's threads need no worker processes.

    Args:
        source: a file, directory or glob, or a list of these.
        batch_size: samples in a batch.
        format: one of ``gdsdata.formats``; None recognises it by the first file's magic.
        shuffle: the order of an epoch; see below.
        seed: chooses the orders.
        device: of the batches. None: CUDA where there is one, else the CPU.
        drop_last: leave out the last, smaller batch.
        rank, world_size: which share of each step this process reads. None: from torch.distributed if it is
            initialised, else from what torchrun, Lightning, MPI or SLURM set (see `gdsdata.data.ranks.Ranks`), else one
            process. They are asked for when iteration begins, or `len`, and an epoch keeps them: another answer within
            it is an error. Shares are disjoint and equally long; see `gdsdata.data.order.permutation.Order`
            for what becomes of a remainder.
        transform: called on each batch, on the consumer's thread.
        prefetch: batches in flight or ready ahead of the consumer.
        zero_copy: on a GPU, hand out the ring's own memory where the batch needs no cast, and spare a copy on the
            device (a fortieth of the link's time). Such a batch belongs to the stream that was current when it came:
            drop it only when all its uses have been given to that stream, or to others named by
            `gdsdata.record_stream`. Who keeps more than ``prefetch`` of them gets copies. On the CPU batches are never
            copied, so it changes nothing.
        residency: ``"pinned"`` maps the files and registers them with the GPU, in the background; as soon as that is
            done (`stats` says so) the GPU gathers batches out of the page cache itself, with next to no work for the
            processor. The files must fit into memory and must not change. None: they are read.
        ragged: what becomes of a field whose size differs from sample to sample: ``"flat"`` a `gdsdata.Ragged` (values
            and offsets), ``"nested"`` a nested tensor of torch's (jagged), ``"padded"`` a tensor ``(B, longest)`` with
            zeros behind shorter ones, ``"list"`` a tensor for each sample.
        decode: of fields by name: a name of `gdsdata.decoders` (``"cls"``, ``"txt"``, ``"json"``, ``"npy"``,
            ``"image"``, ``"encoded"``) or a `gdsdata.decoders.Image`, which run ahead of the consumer on threads of
            their own; or a function, called on the consumer's thread with a list of a batch's values of this field, a
            tensor of bytes for each sample (uint8, on the CPU), which returns what the batch has. With a GPU these
            fields' bytes, and no others, are read to pinned host memory; what is made of them goes to ``device``. At
            most ``prefetch`` batches are decoded ahead.
        options: of the engine.
        uneven: what becomes of samples that are left when the last batch is shared among ranks: ``"drop"`` leaves out
            fewer than ``world_size`` of them, ``"pad"`` gives fewer than ``world_size`` samples twice, ``"repeat"``
            gives so many twice that the last batch is whole. Ranks have equally many batches in any case.
        collate: of samples with fields: called with a list of a batch's samples, on the consumer's thread; what it
            returns is the batch. A sample is a dict of the fields that it has, by their names: what ``decode`` made of
            it, else a tensor (of its shape; of one dimension where sizes differ). Tensors are on ``device``, where
            those of the result (in dicts, lists and tuples too) go as well; of ``"encoded"`` they are in host memory.
            ``transform`` comes behind it and gets the batch. Samples of one size lie in a batch already, so they have
            ``transform`` alone. It takes the place of ``ragged``.
        on_error: ``"skip"`` leaves out what is bad, counts and names it (`stats`), and warns: see below.
        report_every_s: every so many seconds, and with the last batch of each epoch, print to stderr what `report`
            says.
        device_mesh, dp_dim: in the place of ``rank`` and ``world_size``: the mesh that FSDP or tensor parallelism uses,
            and the dimension of it (or several, the outermost first) along which the data is shared. Processes that
            differ along other dimensions alone get the same batches. A mesh of one dimension needs no ``dp_dim``.
        on_break: what the next iterator does if a loop left an epoch before its last batch. ``"restart"``: it starts
            the epoch again, with the same batches. ``"continue"``: it goes on behind the last batch that was handed
            out, so loops of some batches each (``limit_train_batches``) see all of the data; not in a DataLoader's
            workers. None: as ``"restart"``, and warns once.
        split: the part of the samples that this data set has, in the order of the files and before they are shuffled:
            of N samples those from ``round(split[0] * N)`` to ``round(split[1] * N)``, the latter left out. So ``(0,
            0.9)`` and ``(0.9, 1)`` have no sample in common and leave none out, whatever the format and the shuffle.

    The values of ``shuffle``:

    - True or ``"uniform"``: a new uniform order of all samples in each epoch. Each sample is a read of its own.
    - ``"lanes"``: a new order in which samples come out of some hundreds of pieces of 1 MiB at a time, each of them
      read once an epoch, in large reads, where the storage is slow at small ones (see `gdsdata.data.order.lanes`). They
      take up to 1 GiB of host memory, and as much again for those that are read ahead; W ranks share that. A `Lanes`
      is the same with numbers of its own. In a DataLoader with several workers each of them reads all pieces.
    - ``"auto"``: one of these two, by the size of a sample and a moment of reading; ``stats()["shuffle"]`` says which
      and why. If torch.distributed is initialised, as it must be for several ranks, all of its processes have to make
      the data set, and take what the first one found; if it is initialised later, all have to begin to iterate. A
      state that is loaded brings its own.
    - False: the order of the files.
    - Of Parquet, True, ``"lanes"`` and ``"auto"`` all mean: a new order of the row groups, and of the rows of some of
      them at a time (see `gdsdata.data.order.row_groups`). A `RowGroups` is the same with numbers of its own.
      ``"uniform"`` is refused: it would decode a row group for each of its rows.

    With ``on_error="skip"``, these are left out; all else, a stall and a missing file too, stays an error:

    - Files (of MDS and LitData: shards) that their format refuses as damaged when they are indexed: all their samples.
      What is left is the data set, so all ranks have to see the same files, and a state fits that left out the same.
    - Samples whose bytes a decoder refuses (`gdsdata.decoders.Undecodable`), and samples that cannot be read: for an
      error of the storage, or because their file was changed since. Their batch is read once more, sample by sample,
      and is smaller by those that fail again. It keeps its place, so each rank has as many batches as before, and what
      is resumed the same ones. A batch of which nothing is left is an error (`CorruptData`): without it ranks would
      wait for each other.

    On a GPU, ``next`` does not wait until a batch's bytes have arrived there: it makes the current stream wait, so use
    a batch on that stream, or on one that waits for it. A batch is torch's own memory (but see ``zero_copy``).

    Raises:
        FileNotFoundError: ``source`` has no files.
        BackendUnavailable: there is no such device, or ``residency`` is not to be had.
        CorruptData: a file is not what its header or size says.
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, or the files do not fit the format.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int = 64,
        format: Format | None = None,
        shuffle: bool | str | Lanes | RowGroups = True,
        seed: int = 0,
        device: torch.device | str | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        transform: Callable[[torch.Tensor], Any] | None = None,
        prefetch: int = 4,
        zero_copy: bool = False,
        residency: str | None = None,
        ragged: RaggedAs = "flat",
        decode: Mapping[str, str | Decoder | Image] | None = None,
        options: EngineOptions | None = None,
        uneven: str = "drop",
        device_mesh: DeviceMesh | None = None,
        dp_dim: str | int | Sequence[str | int] | None = None,
        collate: Collate | None = None,
        on_error: str = "raise",
        report_every_s: float | None = None,
        on_break: str | None = None,
        split: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        super().__init__()
        arguments.check_types(source, batch_size, format, seed, prefetch, transform, collate, decode, options)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = engine.resolved(device)
        arguments.check_values(prefetch, residency, self.device, ragged, on_error)
        self._split = checked_split(split)
        self.collate = collate
        self._skipped = arguments.skipped_of(on_error)
        self.residency = residency
        self.ragged = ragged
        self.decode = arguments.decoders_of(decode)
        self.transform = transform
        self.prefetch = index_of(prefetch)
        self.zero_copy = zero_copy
        self.options = options or EngineOptions()
        self._paths = list_files(source)
        self._format = format or self._recognised()
        self._ranks, self._epoch_ranks = Ranks(rank, world_size, device_mesh, dp_dim), EpochRanks()
        self._share = self._ranks.found_or_none() or Share(0, 1)  # that the order is made for
        self._batch_size, self._seed = index_of(batch_size), index_of(seed)  # numpy's would overflow
        self._drop_last, self._uneven = drop_last, uneven
        self._choice = choice.ShuffleChoice(shuffle)
        self._index_files()
        self._progress = Progress(on_break)
        self._totals: dict[str, Any] = {
            "bytes": dict.fromkeys(engine.ROUTES, 0),
            **dict.fromkeys(ADDED, 0),
            "mean_ready": 0.0,
        }
        self._piece_bytes, self._piece_memory_bytes = dict.fromkeys(engine.ROUTES, 0), 0  # of iterators that have ended
        self._running: Reader[Any] | None = None  # the newest iterator's
        self._times, self._reporter = StepTimes(), Reporter(report_every_s, self.report)
        self._workers = WorkerTimes()  # of iterators that have ended
        self._workers_before: tuple[Any, WorkerTimes] | None = None  # the engine, and its at the newest one's begin
        if self.device.type == "cuda" and get_worker_info() is None:
            self._source.open()  # its engine is made, and a cast loaded, while the program still prepares

    def _index_files(self) -> None:
        self._index: SampleIndex | None = self._indexed()
        self._data_identity: dict[str, Any] | None = None
        self._choice.begin(self._index, self._share.world_size, self._ranks.are_given)
        self._make_order()
        self._make_source()

    def agree_on_shuffle(self) -> None:
        """Choose what ``shuffle="auto"`` means, if that was not done yet: called by all ranks when iteration begins."""
        if self._choice.agree(self._index, self._share.world_size, self._ranks.are_given):
            self._reorder()

    def take_up(self, share: Share) -> int:
        """Read this share of the data from now on; a `Mix` has all its sources do so.

        Returns:
            Its batches in an epoch.

        Raises:
            ValueError: the data make no batch for each of so many ranks.
        """
        if self._index is None:
            self._index_files()
        if share != self._share:
            before, self._share = self._share, share
            try:
                self._reorder()
            except ValueError:
                self._share = before
                raise
        return len(self._order)

    def _reorder(self) -> None:
        self._make_order()
        if self._source.settings.options != self._options_of_batches:
            self._make_source()

    def _recognised(self) -> Format:
        if self._skipped is None:
            return recognise(self._paths)
        from gdsdata.data.batches.sound_files import first_recognised

        return first_recognised(self._paths)

    def _indexed(self) -> SampleIndex:
        if self._skipped is None:
            index = self._format.index(self._paths)
        else:
            from gdsdata.data.batches.sound_files import index_sound

            index, refusals = index_sound(self._format, self._paths)
            self._skipped.leave_out_files(refusals, len(self._paths))
        if not len(index):
            raise ValueError(f"no samples in {self._paths[0]} (of {len(self._paths)} files)")
        arguments.check_index(index, self._format, self.collate, self.decode)
        return part_of(index, self._split, self._paths[0])

    def _make_order(self) -> None:
        shuffle = self._choice.shape(self._index, self._step_samples)
        self._order = Order(
            len(self._index),
            self._batch_size,
            shuffle,
            self._seed,
            self._drop_last,
            *self._share,
            self._uneven,
        )
        self._shuffle = shuffle

    def _make_source(self) -> None:
        settings = BatchSettings(
            device=self.device,
            options=self._options_of_batches,
            piece_options=self.options,
            batch_size=self._batch_size,
            prefetch=self.prefetch,
            zero_copy=self.zero_copy,
            residency=self.residency,
            ragged=self.ragged,
            decode=self.decode,
            collate=self.collate,
            skipped=self._skipped,
        )
        self._source: BatchSource[Any] = self._index.read_by(Sources(settings))

    @property
    def _options_of_batches(self) -> EngineOptions:
        """Of lanes' batches, which come from memory: what ``direct="always"`` asks for is asked of their pieces."""
        if choice.is_lanes(self._shuffle) and self.options.direct == "always":
            return replace(self.options, direct="auto")
        return self.options

    @property
    def _step_samples(self) -> int:
        return self._batch_size * self._share.world_size

    def __len__(self) -> int:
        """Batches of this rank in an epoch. The ranks of this moment stay the epoch's.

        Raises:
            RuntimeError: the epoch began with other ranks.
        """
        return self.take_up(self._epoch_ranks.fix(self._progress.epoch, self._ranks.found()))

    @property
    def ranks(self) -> Ranks:
        """Where rank and world size come from."""
        return self._ranks

    @property
    def rank(self) -> int:
        """Whose batches these are, of `world_size`."""
        return (self._ranks.found() or self._share).rank

    @property
    def world_size(self) -> int:
        """How many share each step."""
        return (self._ranks.found() or self._share).world_size

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one rank."""
        return self._batch_size

    @property
    def samples(self) -> int:
        """Samples in all files, before they are shared among ranks."""
        if self._index is None:
            self._index_files()
        return len(self._index)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and with it the order, of the next iterator, from its first batch.

        The epoch of a state that was just loaded changes nothing: the next iterator goes on where the state says. So a
        loop may call this before every epoch, a resumed one too.
        """
        self._progress.go_to(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator is, and in which data: O(1) in size, plain numbers and strings.

        It counts the batches that were handed out, not those read ahead, and can be taken at any moment. After the last
        batch of an epoch it says that the next epoch begins. The first call reads the index once, 0.4 s for ten million
        samples with two fields.

        Raises:
            RuntimeError: a DataLoader's worker processes iterate this data set: the state is that of torchdata's
                StatefulDataLoader.
        """
        epoch_share = self._epoch_ranks.of(self._progress.epoch)
        self.take_up(epoch_share or self._ranks.found_or_none() or self._share)
        return {"version": 1, **self._progress.state(), **self._identity(), "data": dict(self._identity_of_data())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iterator continue with exactly the batch after those that ``state`` counts.

        The rank may differ, and so may batch and world size if their product does not.

        The data may have moved, if the files have the same names from their common folder on. Their contents are not
        compared. A state of a version that did not know its data is loaded with a warning.

        Raises:
            TypeError: it is no dict.
            ValueError: the state is of other data, another order, or another product of batch and world size.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"a state is a dict that state_dict() returned, and this is a {type(state).__name__}")
        if state.get("version") != 1:
            raise ValueError(f"this is no state of a GDSDataset that this version knows: {state!r}")
        if "uneven" not in state:  # of a version that only knew this
            state = {**state, "uneven": "drop"}
        before = self._share
        self.take_up(self._ranks.of_state(state, self._batch_size))
        identity = self._identity()
        if self._choice.is_auto:
            identity["shuffle"] = state.get("shuffle")
        from gdsdata.data.identity import refuse_other

        try:
            refuse_other(state, {**identity, "data": self._identity_of_data()})
        except ValueError:
            self.take_up(before)
            raise
        if self._choice.is_auto:
            self._choice.load(state["shuffle"])
            self._reorder()
        self._epoch_ranks.release()
        self._progress.load(state, len(self._order), self._step_samples)

    def _identity(self) -> dict[str, Any]:
        """What must be equal for the same positions to mean the same samples."""
        return {
            "samples": self.samples,
            "shuffle": choice.identity_of(self._shuffle),
            "seed": self._seed,
            "drop_last": self._drop_last,
            "uneven": self._uneven,
            "samples_per_step": self._step_samples,
        }

    def _identity_of_data(self) -> dict[str, Any]:
        """What tells its data from other data; computed once, for it reads the index."""
        if self._index is None:
            self._index_files()
        if self._data_identity is None:
            from gdsdata.data.identity import identity_of

            self._data_identity = identity_of(self._index, self._format, self._split)
        return self._data_identity

    def __repr__(self) -> str:
        more = f" and {len(self._paths) - 1} more" if len(self._paths) > 1 else ""
        return (
            f"{type(self).__name__}({self._paths[0]!r}{more}, {self._format}, batch_size={self._batch_size}, "
            f"shuffle={self._shuffle_name}, device={self.device})"
        )

    def __iter__(self) -> Iterator[Any]:
        """The rest of this epoch, after `load_state_dict`, or the whole of it. Reading begins with this call."""
        warn_of_stacking(self)
        begun = self._progress.begin(len(self), self._step_samples)

        def handed_out(given: int) -> None:
            self._progress.handed_out(begun, given)
            if given == len(begun.numbers):
                self._reporter.epoch_ended()

        return self._to_its_end(self.batches(begun.epoch, begun.numbers, handed_out), begun)

    def _to_its_end(self, batches: Iterator[Any], begun: Begun) -> Iterator[Any]:
        yield from batches
        self._progress.exhausted(begun)

    def batches(
        self, epoch: int, numbers: range | np.ndarray, handed_out: Callable[[int], object] = lambda given: None
    ) -> Iterator[Any]:
        """Some batches of an epoch, read ahead as those of an iterator are, which they leave alone: so is the state.

        Args:
            epoch: chooses the order.
            numbers: of the batches, ascending, each in ``range(len(self))``; an array is int64.
            handed_out: called before each batch with how many there are with it.

        Raises:
            ValueError: on a GPU, in a DataLoader's worker process.
        """
        if get_worker_info() and self.device.type != "cpu":
            raise ValueError(
                f"device={self.device} does not work in a DataLoader's worker processes: use num_workers=0 (the "
                "engine's own threads read ahead) or device='cpu'"
            )
        self.take_up(self._ranks.found() or self._share)
        self.agree_on_shuffle()
        batches = self._read_ahead(epoch, numbers, handed_out)
        end_at_exit(batches, next(batches))
        return batches

    def _read_ahead(
        self, epoch: int, numbers: range | np.ndarray, handed_out: Callable[[int], object]
    ) -> Iterator[Any]:
        """What ends it, once reading has begun, and then the batches."""
        order, check_ranks = self._order, self._ranks.watch(self._share)
        done, total = 0, len(numbers)
        source = self._source
        reader = self._running = source.reader(self._epoch(epoch), owner=self)
        ending = Ending(partial(self._end, reader))
        take, reach = reader.next, reader.reach
        transform, times = self.transform, self._times
        planned, plan_batches = 0, self.prefetch

        def plan() -> None:
            """Ahead of the consumer; the first is short, for the first batch waits for it."""
            nonlocal planned, plan_batches
            reach(int(numbers[done]))
            count = min(plan_batches, total - planned)
            if planned - done > plan_batches // 2 + self.prefetch:
                count = 0
            count = max(reader.steps_local(numbers[planned : planned + count]), 1 if planned == done else 0)
            if count:
                reader.plan(*order.samples_of(epoch, numbers[planned : planned + count]))
                planned += count
                plan_batches = max(self.prefetch, min(2 * plan_batches, _PLAN_SAMPLES // self._batch_size))

        try:
            if total:
                plan()
            yield ending
            times.asked()
            while done < total:
                check_ranks()
                if done:
                    plan()
                with marked("gdsdata: waiting for a batch"):
                    batch = take()
                if transform is not None:
                    batch = times.transformed(transform, batch)
                done += 1
                times.handed_out()
                handed_out(done)
                if self._workers_before is None:  # now, for what they waited before the first batch is not counted yet
                    shared = source.engine
                    self._workers_before = shared, WorkerTimes.of(shared.statistics())
                self._reporter.handed_out()
                if done == total:  # nobody may ask for more: close everything before this batch is yielded
                    break
                yield batch
                times.trained()
                batch = None  # what the consumer has dropped must not live on here
        except (GdsdataError, FileNotFoundError) as error:
            if is_ending_daemon():
                raise SystemExit from None
            if isinstance(error, StallError):
                error.statistics = self.stats()
            self._index = None  # the files are not as they were: look again at the next iteration
            raise
        except RuntimeError:  # of an executor that the program's end has shut down
            if is_ending_daemon():
                raise SystemExit from None
            raise
        finally:
            ending()
        if total:
            yield batch
            times.trained()

    def _epoch(self, number: int) -> Epoch:
        return Epoch(self._shuffle, len(self._index), self._step_samples, self._share, self._seed, number)

    def _end(self, reader: Reader[Any]) -> None:
        """Close what an iterator has open, and keep its counts."""
        self._totals = sum_of(self._totals, reader.statistics())
        if self._running is reader:
            self._running = None
        reader.close()
        self._workers, self._workers_before = self._worker_times(), None
        if (pieces := reader.pieces) is not None:
            self._piece_bytes = sum_of_routes(self._piece_bytes, pieces.bytes)
            self._piece_memory_bytes = max(self._piece_memory_bytes, pieces.memory_bytes)
        self._source.warn_of_fallbacks()

    @property
    def _shuffle_name(self) -> str:
        return {True: "uniform", False: "none"}.get(self._shuffle, str(self._shuffle))

    def report(self) -> Report:
        """Where the time of the loop over this data set went so far: how much of it was waiting for input, what for,
        and what would help.

        Of a `Mix`, the turns of the other data sets count as training. Inside a DataLoader's workers nothing is counted
        here.
        """
        stats = self.stats()
        ring_full_s, stall_s = stats["ring_full_s"], stats["stall_s"]
        return diagnose(self._times, self._worker_times(), stats["bytes"], ring_full_s, stall_s, self._shuffle_name)

    def _worker_times(self) -> WorkerTimes:
        if self._workers_before is None:
            return self._workers
        shared, before = self._workers_before
        return self._workers.plus(WorkerTimes.of(shared.statistics()).minus(before))

    def stats(self) -> dict[str, Any]:
        """What has happened since this data set was made, over all its iterators.

        Returns:
            bytes: delivered in batches handed out, by the route that served them: page_cache, direct, buffered, gds (by
                the disk's own DMA into the GPU), gds_compat (cuFile, but by way of host memory), pinned_page_cache.
            batches: handed out. stalls, stall_s: how often and how long the consumer waited for one.
            mean_ready: batches ready when the consumer came, on average. Near ``prefetch``: the consumer is slower
                than the data. Near 0: the data is slower.
            ring_full_s: time in which the workers had nothing to do for this data set because every slot was ready.
            shuffle: "uniform", "none", the `Lanes` or the `RowGroups`, and why.
            piece_bytes: read in pieces for a lane shuffle, by route, by iterators that have ended; ``bytes`` counts
                them again, as page_cache, when they go from memory into batches. piece_memory_bytes: that took.
            ring_bytes: memory of the ring at most, besides batches that you keep, and what fields were decoded to. Of
                Parquet, with the decoded row groups that are held, about: strings' sizes are known when they are there.
            residency: with ``residency="pinned"``: ready, registered_bytes, and error (why it will not be ready).
            skipped: with ``on_error="skip"``: how many ``files`` and ``samples`` are left out (samples anew in each
                epoch), and ``named``: (path, offset, reason) of the first 100. Of a DataLoader's workers each has its
                own.
            engine: of the engine, which data sets with equal options share: backend, workers, queue_depth,
                segment_bytes, bounce_bytes (at most, staging memory included), bytes by route, storage_bytes (asked of
                the disk: alignment and gaps make it more), transfers and the requests they were coalesced into,
                segments, errors, retries (by way of the host, of what cuFile could not do), segment_latency; of all
                workers together worker_idle_s and worker_active_s, and of the latter worker_storage_s, worker_link_s
                (waiting for copies to or from the GPU) and worker_device_s (for the GPU's own work before these).
        """
        running = self._running
        if self._index is None:
            self._index_files()
        result = sum_of(self._totals, running.statistics()) if running is not None else dict(self._totals)
        epoch = self._epoch(self._progress.epoch)
        result["ring_bytes"] = self._source.ring_bytes(epoch, len(self._order), running)
        result |= self._source.stats()
        result["piece_bytes"], result["piece_memory_bytes"] = dict(self._piece_bytes), self._piece_memory_bytes
        result["shuffle"] = f"{self._shuffle_name}: {self._choice.reason}"
        if self._skipped is not None:
            result["skipped"] = self._skipped.report()
        return result

    def _of_user(self) -> dict[str, Any]:
        decoders = {f"decode[{name!r}]": decoder for name, decoder in self.decode.items()}
        return {"transform": self.transform, "collate": self.collate, "format": self._format, **decoders}

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: all but what belongs to this one."""
        return {**self.__dict__, "_running": None, "_workers_before": None}
