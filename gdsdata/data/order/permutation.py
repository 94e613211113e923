"""Which samples make which batch: epoch order, shuffle and ranks, in O(1) memory.

Nothing here keeps an array as long as the epoch. A shuffled epoch is a keyed bijection
(`Permutation`, or a `lanes.LanePermutation`), evaluated only at the positions asked for, so
starting anywhere in any epoch costs nothing and needs no state but two numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from gdsdata.io import engine

if TYPE_CHECKING:
    from typing import Protocol

    class Shuffle(Protocol):
        """A way to shuffle that `Order` can take in the place of the uniform one."""

        def permutation(
            self, samples: int, step_samples: int, seed: int, epoch: int
        ) -> Callable[[np.ndarray], np.ndarray]:
            """Return an epoch's bijection on ``range(samples)``: positions to ids, int64 (m,)."""


_LARGEST_N = 2**62
UNEVEN = ("drop", "pad", "repeat")
_MASK = 2**64 - 1
_WEYL, _MULTIPLIER_1, _MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: int) -> int:
    """Return one step of splitmix64.

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014.
    """
    x = (x + _WEYL) & _MASK
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & _MASK
    return x ^ (x >> 31)


def epoch_key(seed: int, epoch: int) -> int:
    """Return 64 bits from which all of an epoch's choices are made."""
    return mix(mix(seed & _MASK) ^ (epoch & _MASK))


class Permutation:
    """A bijection on ``range(n)``, chosen by ``(seed, epoch)``.

    It computes with integers only, so it is the same on every machine.

    A position is written in mixed radix as ``left * b + right``, with ``left < a``, ``right < b``
    and ``a * b >= n``. Each round adds a keyed hash of one half to the other. That can be undone,
    so the whole is a bijection on ``range(a * b)``: a generalized Feistel network. A result outside
    ``range(n)`` is sent through again until it lands inside; with ``a * b`` close to ``n`` few are.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002.

    It is a shuffle, not a cipher: every sample is as likely at every position, but a 64-bit key
    cannot reach all n! orders.

    Raises:
        ValueError: ``n`` is not in ``1 .. 2**62``.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 1 <= n <= _LARGEST_N:
            raise ValueError(f"Permutation: n={n} is not in 1 .. 2**62")
        # Both halves stay near sqrt(n): a flat rectangle would mix badly. Within that, the tightest
        # one walks least.
        root = math.isqrt(n - 1) + 1
        a = min(range(root, root + 1 + min(32, root // 16)), key=lambda a: a * -(-n // a))
        self._n, self._a, self._b = n, a, -(-n // a)
        # Small rectangles mix less in a round, and cost less: 8 rounds leave a bias at n = 6 that
        # 16 do not.
        rounds = 8 if n > 1000 else 16
        key = epoch_key(seed, epoch)
        self._keys = np.array([mix(key ^ i) for i in range(rounds)], np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the images of ``positions``. Both are int64 (m,), and in ``range(n)``."""
        return engine.permute(positions, *self.arguments)

    @property
    def arguments(self) -> tuple[int, int, int, np.ndarray]:
        """n, a, b and keys, from which the engine computes it."""
        return self._n, self._a, self._b, self._keys


# Made once an epoch, and not for each few batches.
_kept_permutation = functools.lru_cache(maxsize=8)(Permutation)


def permuted(positions: np.ndarray, n: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the images of positions in small ranges, each with its own key.

    See `Permutation`.

    Args:
        positions: int64 (m,), each in ``range`` of its ``n``.
        n: int64 (m,), sizes of their ranges, from 1 to 2**32.
        keys: uint64 (m,); equal ``n`` and key are the same bijection.

    Returns:
        int64 (m,).
    """
    return engine.permute_each(positions, n, keys)


def mixed(x: np.ndarray) -> np.ndarray:
    """Return `mix` of uint64s."""
    # numpy 1 turns uint64 (x) int into float64, so each constant is a np.uint64.
    x = x + np.uint64(_WEYL)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MULTIPLIER_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MULTIPLIER_2)
    return x ^ (x >> np.uint64(31))


def as_array(numbers: range | np.ndarray) -> np.ndarray:
    """Return a range as int64 (m,), and an array as it is."""
    if isinstance(numbers, range):
        return np.arange(numbers.start, numbers.stop, numbers.step, dtype=np.int64)
    return numbers


class Order:
    """The batches of one rank, as arrays of sample ids.

    With batch size B and W ranks, step g of an epoch covers the positions ``[g*B*W, (g+1)*B*W)``,
    and rank r takes the r-th slice of B of them. In the last, partial step R < B*W positions are
    left, and each rank takes the r-th slice of as many as ``uneven`` says:

    - ``"drop"``: ``R // W``. The other ``R % W`` samples (fewer than W) are left out this epoch,
      and when shuffled they are other ones in the next.
    - ``"pad"``: ``R / W``, rounded up. Every sample comes, and fewer than W of them, the epoch's
      first, once more.
    - ``"repeat"``: B. Every sample comes, every batch is whole, and the epoch's first ``B*W - R``
      come once more.

    With ``drop_last`` the partial step is dropped. It follows:

    - All ranks have the same number of batches, of the same sizes. None waits for another at the
      end.
    - The ranks' shares are disjoint, but for what comes once more.
    - Whole steps depend on B*W alone. A run resumed with other B and W of the same product sees the
      same global batches.

    Args:
        samples: how many there are; ids are ``range(samples)``.
        batch_size: B, samples in a rank's batch.
        shuffle: True: a new uniform order each epoch; False: the order of the ids; or a `Shuffle`,
            as `lanes.Lanes` is.
        seed: chooses the orders; any int.
        drop_last: leave out the partial step.
        rank: this rank r, in ``range(world_size)``.
        world_size: W.
        uneven: ``"drop"``, ``"pad"`` or ``"repeat"``.

    Raises:
        ValueError: an argument is out of range, or this leaves no batch at all.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        shuffle: bool | Shuffle,
        seed: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        uneven: str = "drop",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch has at least one sample")
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: there is at least one rank")
        if batch_size * world_size > _LARGEST_N:
            raise ValueError(
                f"batch_size={batch_size}: the batches of world_size={world_size} ranks have at most 2**62 samples "
                "together: use smaller ones"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not in range(world_size={world_size})")
        if not 1 <= samples <= _LARGEST_N:
            raise ValueError(f"{samples} samples: there must be 1 .. 2**62 of them")
        if uneven not in UNEVEN:
            raise ValueError(f"uneven={uneven!r} is none of {', '.join(UNEVEN)}")
        if drop_last and uneven != "drop":
            raise ValueError(f"uneven={uneven!r} says how to fill the step that drop_last=True leaves out: choose one")
        self._samples, self._batch_size, self._shuffle, self._seed = samples, batch_size, shuffle, seed
        self._rank, self._world_size, self._uneven = rank, world_size, uneven
        self._whole_steps, left = divmod(samples, batch_size * world_size)
        shares = {"drop": left // world_size, "pad": -(-left // world_size), "repeat": batch_size if left else 0}
        self._last_size = 0 if drop_last else shares[uneven]
        self._has_partial_step = left > 0 and not drop_last
        if len(self) == 0:
            needed, remedy = world_size, 'more data, or Sharding(uneven="pad"), which gives samples twice'
            if drop_last:
                needed, remedy = batch_size * world_size, "smaller batches, more data, or drop_last=False"
            raise ValueError(
                f"{samples} samples make no batch for each of world_size={world_size} ranks, which takes {needed} with "
                f"batch_size={batch_size} and drop_last={drop_last}: use fewer ranks, {remedy}"
            )
        self._permutation(epoch=0)  # says what is wrong with a shuffle

    def __len__(self) -> int:
        """Return a rank's number of batches in an epoch, the same for every rank."""
        return self._whole_steps + (self._last_size > 0)

    @property
    def lengths(self) -> range:
        """All values of ``len`` for numbers of ranks whose steps have as many samples."""
        most = self._whole_steps + self._has_partial_step
        least = self._whole_steps if self._uneven == "drop" else most
        return range(max(least, 1), most + 1)

    @property
    def partial_step(self) -> tuple[int, int]:
        """The size of a rank's batch in a partial last step, and how many samples the ranks have.

        The second is 0 if no sample comes twice.
        """
        samples = self._samples % (self._batch_size * self._world_size)
        return self._last_size, samples if self._last_size * self._world_size > samples else 0

    @property
    def largest_batch(self) -> int:
        """Samples in this rank's largest batch: less than B if there is no whole step."""
        return self._batch_size if self._whole_steps else self._last_size

    def plan(self, epoch: int, first_batch: int, batches: int, step: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of batches ``first_batch``, ``first_batch + step``, ...

        Ask for several batches at a time: shuffling 64 positions costs 6 us, and 4096 24 us (two
        cores).

        Returns:
            The sample ids (int64), batch after batch, and the batches' sizes (int64 (batches,)).

        Raises:
            ValueError: one of them is not in ``range(len(self))``.
        """
        end = first_batch + batches * step
        if not 0 <= first_batch <= end < len(self) + step:
            raise ValueError(f"range({first_batch}, {end}, {step}) reaches outside the epoch's {len(self)} batches")
        return self.samples_of(epoch, range(first_batch, end, step))

    def samples_of(self, epoch: int, numbers: range | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `plan` does, of batches by their numbers.

        Args:
            epoch: chooses the order.
            numbers: ascending, and not checked; an array is int64.

        Raises:
            MemoryError: there is none for so many ids.
        """
        with self.memory_errors_named(len(numbers)):
            return self._samples_of(epoch, as_array(numbers))

    @contextlib.contextmanager
    def memory_errors_named(self, batches: int) -> Iterator[None]:
        """For ``with``: a `MemoryError` names the batch size, and how many batches are planned."""
        try:
            yield
        except MemoryError as error:
            raise MemoryError(
                f"batch_size={self._batch_size}: {error}, for the ids of {batches} batches' samples: use a smaller "
                "batch_size"
            ) from error

    def _samples_of(self, epoch: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        begin, length, sizes = self.runs_of(numbers)
        whole = np.count_nonzero(numbers < self._whole_steps)
        within = np.arange(self.largest_batch if whole else 0, dtype=np.int64)
        positions = (begin[:whole, None] + within).ravel()
        if whole < len(begin):
            last = [np.arange(first, first + count) for first, count in zip(begin[whole:], length[whole:], strict=True)]
            positions = np.concatenate([positions, *last])
        permutation = self._permutation(epoch)
        return permutation(positions) if permutation else positions, sizes

    def runs_of(self, numbers: range | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return batches, by their numbers, as runs of positions, none of which is of two batches.

        Args:
            numbers: as of `samples_of`.

        Returns:
            The first position of each run, and how many follow each other: int64 (runs,). The
            samples of each batch: int64 (batches,).
        """
        numbers = as_array(numbers)
        size, step_size = self.largest_batch, self._batch_size * self._world_size
        whole = numbers[: np.searchsorted(numbers, self._whole_steps)]
        begin = whole * step_size + self._rank * size
        length, sizes = np.full(len(whole), size), np.full(len(numbers), size)
        if len(whole) < len(numbers):  # the last, partial step is among them
            start = self._whole_steps * step_size + self._rank * self._last_size
            end = start + self._last_size
            # Positions beyond the samples begin again with the epoch's first ones.
            ends = [*range((start // self._samples + 1) * self._samples, end, self._samples), end]
            begins = np.array([start, *ends[:-1]])
            begin, length = np.append(begin, begins % self._samples), np.append(length, ends - begins)
            sizes[-1] = self._last_size
        return begin, length, sizes

    def uniform(self, epoch: int) -> tuple[int, int, int, np.ndarray] | None:
        """Return the epoch's `Permutation.arguments`, without keys if it is not shuffled.

        None: samples are shuffled in another way.
        """
        if not isinstance(self._shuffle, bool):
            return None
        if not self._shuffle:
            return self._samples, 1, 1, np.empty(0, np.uint64)
        return _kept_permutation(self._samples, self._seed, epoch).arguments

    def _permutation(self, epoch: int) -> Callable[[np.ndarray], np.ndarray] | None:
        if isinstance(self._shuffle, bool):
            return _kept_permutation(self._samples, self._seed, epoch) if self._shuffle else None
        return self._shuffle.permutation(self._samples, self._batch_size * self._world_size, self._seed, epoch)
