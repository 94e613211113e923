"""`GDSDataset`: an IterableDataset whose batches the engine reads ahead, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import index as index_of
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from gdsdata.data import arguments
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.batches.source import load_expected_cast
from gdsdata.data.groups import Fields, Reading, Sharding, group_of
from gdsdata.data.indexing import Indexing
from gdsdata.data.iteration import Iteration
from gdsdata.data.loaders import refuse_in_worker, refuse_second_share
from gdsdata.data.progress import Begun, Progress, checked_epoch
from gdsdata.data.ranked_dataset import RankedDataset
from gdsdata.data.ranks import EpochRanks, Ranks, Share, device_of_batches
from gdsdata.data.samples import Samples
from gdsdata.data.split import checked_split
from gdsdata.formats.index import Format
from gdsdata.formats.listing import Source
from gdsdata.io import engine
from gdsdata.io.options import options_of

if TYPE_CHECKING:
    from gdsdata.data.order.lanes import Lanes
    from gdsdata.data.order.row_groups import RowGroups
    from gdsdata.observe.report import Report


class GDSDataset(RankedDataset):
    """Batches of samples from files, read ahead by the engine.

    An iterator gives one epoch of batches. A batch is a tensor of shape ``(B, *sample shape)`` (the
    formats say shapes and dtypes), a dict of tensors if samples have fields, or the result of
    ``transform``. It is yours for as long as you keep it. Use the data set in place of a
    DataLoader, or inside one as ``DataLoader(dataset, batch_size=None)``; torchdata's
    StatefulDataLoader works too.

    An epoch is over when its last batch is handed out: the next iterator begins the next one, with
    a new order. An epoch broken off starts again from its first batch (see ``on_break``).
    `state_dict` and `load_state_dict` continue it, in another process too.

    Inside a DataLoader with W workers, worker w reads batches w, w + W, w + 2 W and so on, so the
    loader's order is the same as without workers. That works on the CPU only, and is slower: the
    engine's threads need no worker processes.

    On a GPU, ``next`` does not wait until a batch's bytes have arrived there: it makes the current
    stream wait. Use a batch on that stream, or on one that waits for it. A batch is torch's own
    memory (but see `Reading.zero_copy`).

    Args:
        source: a file, directory or glob, or a list or an iterator of these. Each may be the URL of
            objects: ``s3://bucket/train/*.tar`` (docs/guide/remote.md). Files are ordered by their
            paths.
        batch_size: samples in a batch.
        format: one of ``gdsdata.formats``; None recognizes it by the first file's magic.
        shuffle: the order of an epoch; see below.
        seed: chooses the orders.
        device: of the batches, the CPU or a CUDA device. None: the current GPU, or the CPU if there
            is none. If a launcher such as torchrun said the process's place on its node, and GPU 0
            is current, the GPU of that place.
        drop_last: leave out the last, smaller batch.
        transform: called on each batch, on the consumer's thread.
        split: the part of the data that this data set has. A name, as in ``"train"``, means the
            files of this split: see below. Two numbers mean a part of the samples in the order of
            the files, before they are shuffled: of N samples those from ``round(split[0] * N)`` up
            to, but without, ``round(split[1] * N)``, where a half is rounded up. So ``(0, 0.9)``
            and ``(0.9, 1)`` have no sample in common and leave none out, for every format and
            shuffle. ``("train", 0, 0.9)`` is such a part of a split's samples.
        on_error: ``"skip"`` leaves out damaged samples, counts and names them (`stats`), and warns;
            see below. ``"raise"`` raises.
        on_break: what the next iterator does if a loop left an epoch before its last batch.
            ``"restart"``: it starts the epoch again, with the same batches. ``"continue"``: it
            continues behind the last batch that was handed out, so loops of some batches each
            (``limit_train_batches``) see all of the data; not in a DataLoader's workers. None: as
            ``"restart"``, and warns once.
        report_every_s: print `report` to stderr this often, and at the end of each epoch.
        sharding: the share of this process. The default finds it: see `Sharding`.
        fields: how batches are made of samples with fields: see `Fields`.
        reading: the engine's options, and how far it reads ahead: see `Reading`.
        cache, cache_bytes, storage_options: of objects on servers, also in ``reading``: see
            `Reading`.
        old: the groups' arguments by themselves, as in ``prefetch=8``: an old spelling, which warns
            (DeprecationWarning) and which the next version refuses.

    The values of ``shuffle``:

    - True or ``"uniform"``: a new uniform order of all samples in each epoch. Each sample is a read
      of its own.
    - ``"lanes"``: a new order in which samples come from some hundreds of pieces of 1 MiB at a
      time (`gdsdata.data.order.lanes`). Each piece is one large read, for storage that is slow at
      small ones. Pieces take up to 1.2 GiB of host memory, and as much again for those read ahead;
      W ranks share that. Each worker of a DataLoader reads all of them. A `Lanes` has its own
      numbers.
    - ``"auto"``: one of these two, by the size of a sample and a short measurement. For objects
      on servers it is ``"lanes"``, if any of them has two samples.
      ``stats()["shuffle"]`` says which and why. If torch.distributed is initialized, as several
      ranks need, all of its processes have to make the data set, and use the choice of the first
      one. If it is initialized later, all have to begin to iterate. A loaded state has its own
      choice.
    - False: the order of the files.
    - For Parquet, True, ``"lanes"`` and ``"auto"`` all mean a new order of the row groups, and of
      the rows of some at a time (`gdsdata.data.order.row_groups`). A `RowGroups` has its own
      numbers. ``"uniform"`` is refused: it would decode a row group for each of its rows.

    The files of a split by name are, in ``source`` and the folders below it:

    - Beside ``dataset_dict.json`` (`DatasetDict.save_to_disk`): those in the folder of that name.
    - If there are files such as ``data/train-00000-of-00002.parquet``: those of that name alone.
    - Otherwise files in a folder of that name (``train/``, also those of MDS and LitData), and
      files that are named so (``train.parquet``, ``train-000000.tar``). If there are none, the
      other words for the split count: train and training; validation, valid, dev and val; test,
      testing, eval and evaluation. Then names with such a word between other words count, as in
      ``imdb-train.arrow``. If no name has any of these words, all files are ``"train"``.

    With ``on_error="skip"``, these are left out, and every other error is raised:

    - Files (of MDS and LitData: shards) that their format refuses as damaged when they are indexed,
      with all their samples. All ranks have to see the same files, and a state fits if the same
      files were left out.
    - Samples whose bytes a decoder refuses (`gdsdata.decoders.Undecodable`), and samples that
      cannot be read because the storage fails or their file has changed. Their batch is read once
      more, sample by sample, and lacks those that fail again. It keeps its place. A batch without
      any sound sample is an error (`CorruptData`), because ranks would wait for each other.

    Raises:
        FileNotFoundError: ``source`` has no files.
        BackendUnavailable: there is no such device, or ``residency`` is not available.
        CorruptData: a file is not what its header or size says.
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, there is no such split, or the files do not fit the
            format.
        MemoryError: an epoch begins, and ``prefetch`` batches need more memory than is available.
    """

    def __init__(
        self,
        source: Source | bytes | Iterable[str | bytes | os.PathLike[str]],
        batch_size: int = 64,
        format: Format | None = None,
        shuffle: bool | str | Lanes | RowGroups = True,
        seed: int = 0,
        device: torch.device | str | None = None,
        drop_last: bool = False,
        *,
        transform: Callable[[Any], Any] | None = None,
        split: str | tuple[float, float] | tuple[str, float, float] = (0.0, 1.0),
        on_error: str = "raise",
        on_break: str | None = None,
        report_every_s: float | None = None,
        sharding: Sharding | None = None,
        fields: Fields | None = None,
        reading: Reading | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **old: Any,
    ) -> None:
        super().__init__()
        sharding = group_of(Sharding, "sharding", sharding, old)
        fields = group_of(Fields, "fields", fields, old)
        reading = group_of(Reading, "reading", reading, old).with_remote(cache, cache_bytes, storage_options)
        arguments.refuse_unknown(old)
        source = arguments.source_of(source)
        arguments.check_types(batch_size, format, seed, drop_last, transform, fields, reading)
        arguments.check_interval(report_every_s)
        self.device = engine.resolved(device_of_batches(device))
        arguments.check_values(fields, reading, self.device, on_error)
        load_expected_cast(format, self.device)
        self.transform, self._collate = transform, fields.collate
        settings = BatchSettings(
            device=self.device,
            options=options_of(reading.options),
            piece_options=options_of(reading.options),
            batch_size=index_of(batch_size),  # numpy's would overflow
            prefetch=index_of(reading.prefetch),
            zero_copy=reading.zero_copy,
            residency=reading.residency,
            ragged=fields.ragged,
            decode=arguments.decoders_of(fields.decode),
            collate=fields.collate,
            skipped=arguments.skipped_of(on_error),
            remote=arguments.remote_of(source, reading),
        )
        part = checked_split(split)
        self._ranks = Ranks(sharding.rank, sharding.world_size, sharding.device_mesh, sharding.dp_dim)
        self._epoch_ranks = EpochRanks()
        self._peers = arguments.peers_of(sharding, fields, settings.decode)
        has_peers = (self._ranks.found_or_none() or Share(0, 1)).world_size > 1
        has_peers |= sharding.device_mesh is not None and sharding.device_mesh.size() > 1
        self._progress = Progress(on_break)
        self._samples = Samples(
            Indexing(source, format, settings.skipped, reading.index_cache, has_peers, part.name),
            part,
            shuffle,
            index_of(seed),
            bool(drop_last),  # numpy's would be in the state
            sharding.uneven,
            self._ranks,
            settings,
            self._progress,
            self._peers,
        )
        self._iteration = Iteration(self._samples, self._ranks, report_every_s)
        if self.device.type == "cuda" and get_worker_info() is None:
            self._samples.source.open()  # it makes its engine, and loads a cast, while the program still prepares

    def set_epoch(self, epoch: int) -> None:
        """Have the next iterator begin this epoch, in its order, at the first batch.

        Directly after `load_state_dict`, the state's own epoch changes nothing, so a resumed loop
        may call this before every epoch too.

        With a DataLoader's workers, call it before ``iter(loader)``. After that it is for the next
        loop, but a loop of persistent workers, except their first one, may still read it. All
        workers of a loop read the same epoch.

        Raises:
            ValueError: it is negative, no whole number, or beyond all counting.
            RuntimeError: a loader of accelerate calls it that would share out the batches of this
                process's share among the processes once more.
        """
        refuse_second_share(self, lambda: self.world_size)
        self._progress.go_to(checked_epoch(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator is, and in which data: numbers and strings.

        It counts the batches that were handed out, not those read ahead, and can be taken at any
        moment. After the last batch of an epoch it says that the next epoch begins. The first call
        reads the index once, 0.4 s for ten million samples with two fields.

        Raises:
            RuntimeError: a DataLoader's worker processes iterate this data set. Use the state of
                torchdata's StatefulDataLoader.
        """
        epoch_share, samples = self._epoch_ranks.of(self._progress.epoch), self._samples
        samples.take_up(epoch_share or self._ranks.found_or_none() or samples.share)
        return {"version": 1, **self._progress.state(), **samples.identity(), "data": dict(samples.identity_of_data())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iterator continue with the batch after those ``state`` counts.

        The rank may differ, and so may batch and world size if their product does not. The data may
        have moved, if the files have the same names from their common folder on. Their contents are
        not compared. A state of a version that did not store its data is loaded with a warning.

        Raises:
            TypeError: it is no dict.
            ValueError: the state is of other data, another order, or another product of batch and
                world size, or one of its numbers cannot be.
        """
        checked = arguments.checked_state(state)
        self._samples.take_order_of(checked)
        self._epoch_ranks.release()
        self._progress.load(checked, len(self._samples.order), self._samples.step_samples)

    def __repr__(self) -> str:
        samples, paths = self._samples, self._samples.paths
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return (
            f"{type(self).__name__}({paths[0]!r}{more}, {samples.format}, batch_size={self.batch_size}, "
            f"shuffle={samples.shuffle_name}, device={self.device})"
        )

    def _step_samples(self) -> int:
        return self._samples.step_samples

    def _batches_of(self, begun: Begun) -> Iterator[Any]:
        def handed_out(given: int) -> None:
            self._progress.handed_out(begun, given)
            if given == len(begun.numbers):
                self._iteration.reporter.epoch_ended(self._iteration.report)

        return self._to_its_end(self.batches(begun.epoch, begun.numbers, handed_out), begun)

    def _to_its_end(self, batches: Iterator[Any], begun: Begun) -> Iterator[Any]:
        yield from batches
        self._progress.exhausted(begun)

    def batches(
        self, epoch: int, numbers: range | np.ndarray, handed_out: Callable[[int], object] = lambda given: None
    ) -> Iterator[Any]:
        """Read some batches of an epoch ahead, without a change of iterators or state.

        Args:
            epoch: chooses the order.
            numbers: of the batches, ascending, each in ``range(len(self))``; an array is int64.
            handed_out: called before each batch with how many there are with it.

        Raises:
            ValueError: on a GPU, or with ``share_reads``, in a DataLoader's worker process.
        """
        refuse_in_worker(self.device, shares_reads=self._peers is not None)
        self._samples.take_up(self._ranks.found() or self._samples.share)
        self._samples.agree_on_shuffle()
        return self._iteration.begin(epoch, numbers, handed_out, self.transform, owner=self)

    def report(self) -> Report:
        """Return where the time of the loop over this data set went, and what would help.

        For a `Mix`, the turns of the other data sets count as training. Nothing is counted here
        inside a DataLoader's workers.
        """
        return self._iteration.report()

    def stats(self) -> dict[str, Any]:
        """Return what has happened since this data set was made, over all its iterators.

        Returns:
            bytes: delivered in batches handed out, by the route that served them: page_cache,
                direct, buffered, gds (the disk's own DMA into the GPU), gds_compat (cuFile by way
                of host memory), pinned_page_cache. Objects have remote (from a
                server), cache_fill (the same, and written to the cache) and local_cache.
            batches: handed out. stalls, stall_s: how often and how long the consumer waited.
            mean_ready: batches ready when the consumer came, on average (on a GPU, groups of small
                batches). Near ``prefetch``, the consumer is slower than the data. Near 0, the data
                is slower.
            ring_full_s: time in which the workers had nothing to do because every slot was ready.
            shuffle: "uniform", "none", the `Lanes` or the `RowGroups`, and why.
            piece_bytes, piece_memory_bytes: of iterators that have ended, read in pieces for a lane
                shuffle, by route, and their memory. ``bytes`` counts them again, as page_cache.
            ring_bytes: memory of the ring at most, with what ``share_reads`` adds. Batches that you
                keep and decoded fields are not included; decoded row groups of Parquet are, about.
            residency: with ``residency="pinned"``: ready, registered_bytes and error.
            skipped: with ``on_error="skip"``: how many ``files`` and ``samples`` are left out
                (samples anew in each epoch), and ``named``: (path, offset, reason) of the first
                100. Each worker of a DataLoader has its own.
            network: if there are objects: counts of this process's client so far, for all data
                sets. requests, retries, throttled (429 and 503), hedges (ranges that were asked for
                twice), bytes and connections.
            engine: its settings, bytes by route, storage_bytes (requested from the disk, with
                alignment and gaps), transfers, requests, segments, errors, retries (by way of the
                host, if cuFile failed) and segment_latency. Data sets with equal options share it.
                All workers' worker_idle_s and worker_active_s. The latter includes
                worker_storage_s, worker_link_s (waiting for copies to or from the GPU) and
                worker_device_s (waiting for the GPU's work before these copies).
        """
        return self._iteration.stats(self._progress.epoch)

    def _of_user(self) -> dict[str, Any]:
        decoders = {f"decode[{name!r}]": decoder for name, decoder in self._samples.settings.decode.items()}
        return {"transform": self.transform, "collate": self._collate, "format": self._samples.format, **decoders}
