"""`Sharding`, `Fields` and `Reading`: groups of arguments of `GDSDataset`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gdsdata.warn import warn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gdsdata.data.batches.ragged import RaggedAs
    from gdsdata.data.batches.settings import Collate
    from gdsdata.decoders import Decoder, Image
    from gdsdata.io.options import EngineOptions


class Sharding(NamedTuple):
    """Which share of each step this process reads.

    Without arguments, rank and world size come from torch.distributed if it is initialized, else
    from what torchrun, Lightning, MPI or SLURM set (`gdsdata.data.ranks.Ranks`), else there is one
    process. They are looked up when iteration begins, or `len`, and an epoch keeps them: another
    answer within it is an error. Shares are disjoint and equally long.

    Attributes:
        rank, world_size: this process's share, and how many there are. Give both or neither.
        device_mesh: in the place of both, the mesh that FSDP or tensor parallelism uses.
        dp_dim: the dimension of the mesh (or several, the outermost first) along which the data is
            shared. Processes that differ along other dimensions alone get the same batches. A mesh
            of one dimension needs none.
        uneven: what happens to samples that are left when the last batch is shared among ranks.
            ``"drop"`` leaves out fewer than ``world_size`` samples, ``"pad"`` gives fewer than
            ``world_size`` samples twice, and ``"repeat"`` gives so many twice that the last batch
            is complete. Ranks have equally many batches in any case.
        share_reads: with a ``device_mesh``, processes that get the same batches (they differ along
            its other dimensions: tensor, context or pipeline parallel) read each of them together.
            Each of P reads 1 / P, and gathers the rest: over NCCL on a GPU, over gloo on the CPU.
            Batches, order and states are as without it. See docs/guide/shuffle-and-resume.md.
    """

    rank: int | None = None
    world_size: int | None = None
    device_mesh: DeviceMesh | None = None
    dp_dim: str | int | Sequence[str | int] | None = None
    uneven: str = "drop"
    share_reads: bool = False


class Fields(NamedTuple):
    """How batches are made of samples with fields.

    Attributes:
        ragged: what a field becomes whose size differs from sample to sample. ``"flat"``: a
            `gdsdata.Ragged` (values and offsets). ``"nested"``: torch's nested tensor (jagged).
            ``"padded"``: a tensor ``(B, longest)`` with zeros behind shorter values. ``"list"``: a
            tensor for each sample.
        decode: decoders by the names of fields. A decoder is a name of `gdsdata.decoders`
            (``"cls"``, ``"txt"``, ``"json"``, ``"npy"``, ``"image"``, ``"encoded"``) or a
            `gdsdata.decoders.Image`; these run ahead of the consumer on threads of their own, at
            most ``prefetch`` batches. Or it is a function, called on the consumer's thread with a
            list of a batch's values (a uint8 CPU tensor for each sample), that returns what the
            batch has. With a GPU, the bytes of these fields are read to pinned host memory, and
            decoded values go to ``device``.
        collate: called with a list of a batch's samples, on the consumer's thread; its result is
            the batch. A sample is a dict of the fields that it has: decoded values, else tensors.
            Tensors are on ``device``, and tensors of the result (in dicts, lists and tuples too) go
            there as well. ``"encoded"`` values stay in host memory. ``transform`` gets the result.
            It takes the place of ``ragged``.
    """

    ragged: RaggedAs = "flat"
    decode: Mapping[str, str | Decoder | Image] | None = None
    collate: Collate | None = None


class Reading(NamedTuple):
    """How batches are read.

    Attributes:
        options: of the engine. None: `gdsdata.EngineOptions` with its defaults.
        prefetch: batches in flight or ready ahead of the consumer, at most 65,536. For a GPU,
            batches of less than 32 MiB come as many at a time as fit into that, and then it counts
            these groups. Such a batch is a view: to keep a few of many, keep a ``clone()``.
        zero_copy: on a GPU, hand out the ring's own memory if the batch needs no cast. This saves a
            copy on the device (a fortieth of the link's time). Such a batch belongs to the stream
            that was current when it came: drop it only when all its uses have been queued on that
            stream, or on others named by `gdsdata.record_stream`. If you hold more than
            ``prefetch`` of them, later ones are copied. CPU batches are never copied.
        residency: ``"pinned"`` maps the files and registers them with the GPU, in the background.
            When that is done (`GDSDataset.stats` reports it), the GPU gathers batches from the page
            cache itself. The files must fit into memory and must not change. None: they are read.
        index_cache: where an index that took more than half a second is kept for the next start. It
            is used while the folders of the files, and a sample of the files, are as they were, and
            one process of a machine makes it for all. ``"user"``: in ``~/.cache/gdsdata/index``.
            Else the path of a folder. None: every start indexes all files. An index of URLs is kept
            however fast it was made, and used while a list has the same sizes and versions.
        cache: a folder on a local disk, where the bytes of objects (URLs) are kept for the next
            epoch, for other ranks and for other runs. A process has one cache, the one that was
            named last. None: that one, or else the environment's GDSDATA_CACHE, and without both
            nothing is kept. Local files are never cached.
        cache_bytes: the most that the cache may take: a number, or as in ``"500GiB"``. None: the
            bound that the cache has already, or its default.
        storage_options: of the store of the URLs, in place of the environment: ``endpoint_url``,
            ``region``, ``credentials`` and others (`gdsdata.storage.stores`). They hold for all
            URLs of the same scheme in this process.
    """

    options: EngineOptions | None = None
    prefetch: int = 4
    zero_copy: bool = False
    residency: str | None = None
    index_cache: str | os.PathLike[str] | None = "user"
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | str | None = None
    storage_options: Mapping[str, Any] | None = None

    def with_remote(
        self,
        cache: str | os.PathLike[str] | None,
        cache_bytes: int | str | None,
        storage_options: Mapping[str, Any] | None,
    ) -> Reading:
        """Return the same with those of these arguments that are given.

        Raises:
            TypeError: an argument is given both ways.
        """
        said: dict[str, Any] = {"cache": cache, "cache_bytes": cache_bytes, "storage_options": storage_options}
        given = {name: value for name, value in said.items() if value is not None}
        for name in given:
            if getattr(self, name) is not None:
                raise TypeError(f"{name}= is given twice: by itself, and in reading=gdsdata.Reading(...)")
        return self._replace(**given) if given else self

    def __repr__(self) -> str:
        fields = {**self._asdict(), "storage_options": self.storage_options and sorted(self.storage_options)}
        return f"Reading({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


GroupT = TypeVar("GroupT", Sharding, Fields, Reading)


def group_of(kind: type[GroupT], name: str, given: GroupT | None, old: dict[str, Any]) -> GroupT:
    """Return a group of arguments, from itself or from their old spelling.

    Args:
        kind: of the group.
        name: of the argument that takes the group.
        given: the group; None: the defaults.
        old: arguments by their old spelling, as in ``GDSDataset(..., rank=0)``. Those of this group
            are taken out.

    Raises:
        TypeError: ``given`` is of another type, or an argument is given both ways.
    """
    spelled = {field: old.pop(field) for field in kind._fields if field in old}
    names = ", ".join(f"{field}=" for field in spelled)
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"{name}={given!r} must be a gdsdata.{kind.__name__}")
    if not spelled:
        return kind() if given is None else given
    if given is not None:
        raise TypeError(f"{names} belongs into {name}=gdsdata.{kind.__name__}(...), which is given too")
    warn(
        f"GDSDataset({names}...) is an old spelling, which the next version refuses: write "
        f"GDSDataset({name}=gdsdata.{kind.__name__}({names}...))",
        DeprecationWarning,
    )
    return kind(**spelled)
