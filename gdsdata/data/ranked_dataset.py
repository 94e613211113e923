"""`RankedDataset`: a data set of which each rank reads its share."""

from __future__ import annotations

from gdsdata.data.epoch_dataset import EpochDataset
from gdsdata.data.ranks import EpochRanks, Ranks, Share
from gdsdata.data.samples import Samples


class RankedDataset(EpochDataset):
    """The share of a `GDSDataset`, and what loops and a `Mix` ask about it.

    A derived class sets these members:

        _samples: of all files, in the order of an epoch.
        _ranks: where rank and world size come from.
        _epoch_ranks: the ranks with which an epoch began.
    """

    _samples: Samples
    _ranks: Ranks
    _epoch_ranks: EpochRanks

    def agree_on_shuffle(self) -> None:
        """Choose what ``shuffle="auto"`` means. A `Mix` calls it when iteration begins."""
        self._samples.agree_on_shuffle()

    def take_up(self, share: Share) -> int:
        """Read this share from now on, and return its batches in an epoch. For `Mix`."""
        return self._samples.take_up(share)

    @property
    def epoch_lengths(self) -> range:
        """How many batches an epoch has, for any number of ranks. For `Mix`."""
        return self._samples.order.lengths

    @property
    def partial_step(self) -> tuple[int, int]:
        """See `Order.partial_step`. For a loader of accelerate."""
        return self._samples.order.partial_step

    def __len__(self) -> int:
        """Return this rank's number of batches in an epoch, whose ranks are fixed now.

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
        """The rank that reads these batches, of `world_size`."""
        return (self._ranks.found() or self._samples.share).rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share each step."""
        return (self._ranks.found() or self._samples.share).world_size

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one rank."""
        return self._samples.settings.batch_size

    @property
    def prefetch(self) -> int:
        """Batches in flight or ready ahead of the consumer."""
        return self._samples.settings.prefetch

    @property
    def samples(self) -> int:
        """Samples in all files, before they are shared among ranks."""
        return len(self._samples)
