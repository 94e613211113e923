"""Copies of ranks' files in the memory of nodes: where they go, and which save is restored.

Pure functions: the ranks exchange what they have, and all of them choose alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from gdsdata.checkpoint.background.manifest import Manifest, SavedFile

_NAME = re.compile(r"(\d+)-step-(\d+)-of-(\d+)-([0-9a-f]{8})-([0-9a-f]{16})")


class Generation(NamedTuple):
    """A save of which nodes have copies in memory.

    Attributes:
        sequence: rises with each save, as `Manifest.sequence` does.
        step: the step.
        ranks: how many ranks saved it.
        number: the random part of its files' names.
        run: the random name of the checkpoint folder that it belongs to.
    """

    sequence: int
    step: int
    ranks: int
    number: str
    run: str

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.sequence}-step-{self.step}-of-{self.ranks}-{self.number}-{self.run}"

    @classmethod
    def named(cls, name: str) -> Generation | None:
        """Return the generation whose folder has a name; None if it is another folder."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2]), int(found[3]), found[4], found[5]) if found else None

    def file(self, rank: int) -> str:
        """Return the name of a rank's file, here and in the checkpoint."""
        return f"rank-{rank}-{self.number}.pt"


class Copy(NamedTuple):
    """A complete copy of a rank's file.

    Attributes:
        generation: the save.
        rank: whose file it is.
        size_bytes: its size.
    """

    generation: Generation
    rank: int
    size_bytes: int


class Held(NamedTuple):
    """The copies that a rank finds in the memory of its node.

    Attributes:
        place: a name for that memory; ranks that see the same memory have the same place.
        copies: the complete ones.
    """

    place: str
    copies: tuple[Copy, ...]


class Transfer(NamedTuple):
    """A file that one rank sends to another.

    Attributes:
        file: the rank whose file it is.
        source, destination: the ranks that send and receive it.
        size_bytes: its size.
    """

    file: int
    source: int
    destination: int
    size_bytes: int


class InMemory(NamedTuple):
    """A save that can be restored from memory.

    Attributes:
        generation: the save.
        files: those of the ranks, in order.
        transfers: the files that must be sent before each rank finds its own in its node's memory.
    """

    generation: Generation
    files: tuple[SavedFile, ...]
    transfers: tuple[Transfer, ...]

    def is_newer(self, stored: Manifest, sequence: int) -> bool:
        """Return whether this is the same save as a checkpoint on storage, or a newer one.

        Args:
            stored: the checkpoint.
            sequence: its place in the order of checkpoints.
        """
        if stored.step == self.generation.step and stored.files[0].name == self.files[0].name:
            return stored.files == self.files  # else a copy is damaged
        return self.generation.sequence > sequence


def partners_of(places: Sequence[str]) -> list[int]:
    """Return the rank that keeps the copy of each rank's file.

    Each rank keeps the copy of one other rank. As many partners as possible are at other places
    than their ranks. If the largest place has at most half of the ranks, all are.

    The ranks stand in a circle, those of one place side by side. A rank's partner is on the
    opposite side.

    Args:
        places: the node of each rank, of two or more.
    """
    number_of = {place: number for number, place in enumerate(dict.fromkeys(places))}
    circle = sorted(range(len(places)), key=lambda rank: number_of[places[rank]])
    half = len(circle) // 2
    partners = [0] * len(circle)
    for at, rank in enumerate(circle):
        partners[rank] = circle[(at + half) % len(circle)]
    return partners


def transfers_to_partners(places: Sequence[str], sizes_bytes: Sequence[int]) -> list[Transfer]:
    """Return what ranks send to their partners: nothing where both see the same memory.

    Args:
        places: of each rank.
        sizes_bytes: of each rank's file.
    """
    if len(places) < 2:
        return []
    return [
        Transfer(rank, rank, partner, sizes_bytes[rank])
        for rank, partner in enumerate(partners_of(places))
        if places[rank] != places[partner]
    ]


def newest_in_memory(held: Sequence[Held], run: str | None, step: int | None) -> InMemory | None:
    """Return the newest save of which the ranks have a copy of every file.

    Args:
        held: what each rank has.
        run: saves of other runs do not count; None: all are of others.
        step: only saves of this step count; None: those of all steps.
    """
    places = [one.place for one in held]
    found: dict[Generation, dict[tuple[int, int], set[str]]] = {}  # the places of each rank and size
    for place, copies in held:
        for generation, rank, size_bytes in copies:
            if generation.run == run and generation.ranks == len(held) and step in (None, generation.step):
                found.setdefault(generation, {}).setdefault((rank, size_bytes), set()).add(place)
    for generation in sorted(found, reverse=True):
        of_files = sorted(found[generation].items())
        # Copies of one file have one size; else one of them is damaged.
        if [rank for (rank, _), _ in of_files] != list(range(len(held))):
            continue
        files = tuple(SavedFile(generation.file(rank), size_bytes) for (rank, size_bytes), _ in of_files)
        transfers = tuple(
            Transfer(rank, _one_at(places, at, rank), rank, size_bytes)
            for (rank, size_bytes), at in of_files
            if places[rank] not in at
        )
        return InMemory(generation, files, transfers)
    return None


def _one_at(places: Sequence[str], at: Collection[str], turn: int) -> int:
    """Return one of the ranks at some places: they take turns."""
    ranks = [rank for rank, place in enumerate(places) if place in at]
    return ranks[turn % len(ranks)]
