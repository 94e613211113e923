"""`Indexing`: the index of a source's samples, made anew or kept from an earlier start."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gdsdata.errors import CorruptData
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.kept_index import WORTH_S, KeptIndex, is_kept_format
from gdsdata.formats.listing import Listing, Source, listing_of, sources_of
from gdsdata.progress_bars import bar
from gdsdata.storage.urls import have_urls
from gdsdata.user_cache import NoHomeFolder
from gdsdata.version import __version__

if TYPE_CHECKING:
    from gdsdata.data.batches.skipped import Skipped


# The files of a source, their format, and where their samples lie.
Indexed = tuple[Sequence[str], Format, SampleIndex]


class Indexing:
    """Finds and indexes the files of a source.

    Args:
        source: as of `GDSDataset`.
        format: of the files; None: recognized by the first file.
        skipped: with ``on_error="skip"``, counts the files that are left out.
        index_cache: as of `Reading`.
        shared: other processes index the same source now: one of them does it for all.
        split: the name of the split whose files are meant; None: all files of the source.
    """

    def __init__(
        self,
        source: Source,
        format: Format | None,
        skipped: Skipped | None,
        index_cache: str | os.PathLike[str] | None,
        shared: bool,
        split: str | None = None,
    ) -> None:
        self._split = split
        self._source, self._format, self._skipped, self._shared = source, format, skipped, shared
        self._listing: Listing | None = None
        sources = sources_of(source)
        self._first_source, self._is_remote = next(iter(sources), ""), have_urls(sources)
        self._kept: KeptIndex | None = None
        if index_cache is not None and is_kept_format(format):
            with contextlib.suppress(NoHomeFolder):
                self._kept = KeptIndex(source, format, index_cache, __version__, split)

    def indexed(self, on_format: Callable[[Format, str], object]) -> Indexed:
        """Return the index.

        Args:
            on_format: called with the format and one of the files before files are indexed anew; if
                these are known without listing the source, before that too.

        Raises:
            FileNotFoundError, IoError, CorruptData, ValueError: as `listing_of`, `recognise` and
                `Format.index` raise them.
        """
        if self._is_remote:
            self._list()
        if self._kept is None:
            return self._new(on_format)
        if found := self._found(self._kept):
            return found
        if self._shared:
            with self._kept.turn() as is_first:
                if found := self._found(self._kept):
                    return found
                if is_first:
                    return self._new(on_format)
        return self._new(on_format)  # another process made it, and it was not worth keeping: all make it at once

    def forget(self) -> None:
        """Index the same files anew the next time: they are not as their index says."""
        if self._kept is not None:
            self._kept.drop()
            self._kept = None

    def _list(self) -> None:
        """List the source: what is known of its objects is then as they are now.

        When the same data is indexed anew, its files stay those that they were.
        """
        listing = listing_of(self._source, self._split)
        self._listing = self._listing or listing

    def _found(self, place: KeptIndex) -> Indexed | None:
        kept = place.find(self._listing if self._is_remote else None)
        if kept is None:
            return None
        paths, format_name, index = kept
        format = self._format or self._kept_format(paths, format_name)
        if type(format).__name__ != format_name:
            return None  # a format was registered that is asked first
        self._listing = Listing(paths, [])
        return paths, format, index

    def _new(self, on_format: Callable[[Format, str], object]) -> Indexed:
        begun_ns, begun = time.time_ns(), time.monotonic()
        given = self._format if os.path.isfile(self._first_source) else None
        if given is not None:  # it need not wait for the list
            on_format(given, self._first_source)
        listing = self._listing or listing_of(self._source, self._split)
        self._listing, paths = listing, list(listing.paths)
        format = self._format or self._recognised(paths)
        if given is None:
            on_format(format, paths[0])
        if getattr(format, "takes_any_bytes", False) and len(listing.named) < len(paths):
            from gdsdata.formats.data_files import refuse_unlike_endings  # late: files by name need none

            refuse_unlike_endings(paths, listing.named, format)
        left_out = 0
        if self._skipped is None:
            try:
                with bar("indexing", unit="files"):
                    index = format.index(paths)
            except CorruptData as error:
                from gdsdata.formats.registry import refuse_another_kind, refuse_other_format

                if self._format is None:
                    refuse_another_kind(error.path, paths)
                elif error.path in paths:
                    refuse_other_format(error.path, self._format)
                raise
        else:
            from gdsdata.data.batches.sound_files import index_sound

            with bar("indexing", unit="files"):
                index, refusals = index_sound(format, paths)
            self._skipped.leave_out_files(refusals, len(paths))
            left_out = len(refusals)
        is_worth = self._is_remote or time.monotonic() - begun > WORTH_S
        if self._kept is not None and is_worth and len(index) and not left_out and is_kept_format(format):
            shared_paths, index = self._kept.keep(listing, format, index, begun_ns)
            self._listing = Listing(shared_paths, [])
            return shared_paths, format, index
        return paths, format, index

    def _kept_format(self, paths: Sequence[str], name: str) -> Format:
        """Return the format of a kept index, whose files are only looked at if that is fast."""
        if self._is_remote:
            from gdsdata.formats.registry import default_named

            if (format := default_named(name)) is not None:
                return format
        return self._recognised(paths)

    def _recognised(self, paths: Sequence[str]) -> Format:
        if self._skipped is None:
            from gdsdata.formats.registry import recognise  # a format that is given needs no other

            return recognise(paths)
        from gdsdata.data.batches.sound_files import first_recognised

        return first_recognised(paths)
