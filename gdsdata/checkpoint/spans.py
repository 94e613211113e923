"""Spans: stretches of a record that are read with the gaps between the rows that tensors want."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.tensor_rows import PAGE_BYTES, Rows, costs_less_with_gaps
from gdsdata.checkpoint.tree import Path

# A span begins at a multiple of the largest element, as records do.
_ALIGNMENT = 16


class Gapped(NamedTuple):
    """A tensor that gets rows of a record.

    Attributes:
        target: the tensor.
        stored: where its values lie.
        rows: in the file.
        name: the path of the tensor, for errors.
        read_alone: has it read without the others of the record.
    """

    target: torch.Tensor
    stored: Stored
    rows: Rows
    name: Path
    read_alone: Callable[[], None]

    @property
    def may_share_a_span(self) -> bool:
        """Whether its rows are short, with gaps in which those of others may lie."""
        return self.rows.size_bytes < PAGE_BYTES and self.stored.span_bytes > self.stored.size_bytes

    @property
    def sparsity(self) -> int:
        """How often its values would fit into its part of the record, as a power of two."""
        return (self.stored.span_bytes // self.stored.size_bytes).bit_length()


class Span(NamedTuple):
    """A stretch of a record that is read whole, and the tensors whose values are copied from it.

    Attributes:
        begin, end: in the record, in bytes.
        tensors: some of the record's.
    """

    begin: int
    end: int
    tensors: list[Gapped]


def spans_of(tensors: Sequence[Gapped]) -> tuple[list[Span], list[Gapped]]:
    """Return what is read as spans, and the tensors whose rows are read one by one.

    Each tensor judged alone, the interleaved columns of a table would all be read row by row, or
    each with all others between. So tensors whose parts of the record overlap are judged as one.

    Args:
        tensors: of one record.
    """
    spans, alone = list[Span](), list[Gapped]()
    for group in _connected(tensors):
        begin = group[0].stored.offset // _ALIGNMENT * _ALIGNMENT
        end = max(one.stored.offset + one.stored.span_bytes for one in group)
        size_bytes = sum(one.stored.size_bytes for one in group)
        if costs_less_with_gaps(end - group[0].stored.offset, size_bytes, sum(one.rows.count for one in group)):
            spans.append(Span(begin, end, group))
            continue
        sparsest = max(one.sparsity for one in group)
        denser = [one for one in group if one.sparsity < sparsest]
        if not denser:
            alone += group
            continue
        # Without the sparsest ones: they must not have the others read row by row.
        for part in (denser, [one for one in group if one.sparsity == sparsest]):
            of_part = spans_of(part)
            spans += of_part[0]
            alone += of_part[1]
    return spans, alone


def _connected(tensors: Sequence[Gapped]) -> list[list[Gapped]]:
    """Return groups whose parts of the record overlap, each in the order of their begins."""
    groups, end = list[list[Gapped]](), 0
    for one in sorted(tensors, key=lambda one: one.stored.offset):
        if groups and one.stored.offset < end:
            groups[-1].append(one)
        else:
            groups.append([one])
        end = max(end, one.stored.offset + one.stored.span_bytes)
    return groups
