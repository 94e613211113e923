"""Checks of the arguments of `GDSDataset`: types, ranges, fit to the samples."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from gdsdata.data.groups import Fields, Reading, Sharding
from gdsdata.data.progress import position_in
from gdsdata.data.ranks import peers_in
from gdsdata.formats.catalog import FORMATS
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.listing import Source, sources_of
from gdsdata.io.engine import reaches
from gdsdata.io.options import options_of
from gdsdata.storage.urls import have_urls
from gdsdata.whole_numbers import flag, shown, whole_number

if TYPE_CHECKING:
    from gdsdata.collective.peers import Peers
    from gdsdata.data.batches.settings import Collate
    from gdsdata.data.batches.skipped import Skipped
    from gdsdata.decoders import Decoder, Image
    from gdsdata.storage.settings import RemoteSettings

_LARGEST_PREFETCH = 2**16  # a slot takes 0.8 KiB, whatever its batch takes
_NO_WORKERS = "leave it out, because the engine's threads read ahead without worker processes"
_NO_SAMPLERS = "leave it out. shuffle= and seed= choose the order, split= a part of the samples, and ranks share them"
_ON_DEVICE = "leave it out, because batches are on device= when they come"
# Remedies for the arguments of a DataLoader of torch, by name.
_OF_A_DATALOADER = {
    "num_workers": _NO_WORKERS,
    "persistent_workers": _NO_WORKERS,
    "in_order": _NO_WORKERS,
    "worker_init_fn": _NO_WORKERS,
    "multiprocessing_context": _NO_WORKERS,
    "prefetch_factor": "write reading=gdsdata.Reading(prefetch=...), the number of batches that are read ahead",
    "pin_memory": _ON_DEVICE,
    "pin_memory_device": _ON_DEVICE,
    "sampler": _NO_SAMPLERS,
    "batch_sampler": _NO_SAMPLERS,
    "generator": "write seed=, a number that chooses the orders",
    "collate_fn": "write fields=gdsdata.Fields(collate=...) for samples with fields, or transform= for whole batches",
    "timeout": "write reading=gdsdata.Reading(options=gdsdata.EngineOptions(stall_timeout_s=...))",
}


def source_of(source: Any) -> Source:
    """Return a source of `GDSDataset` that can be gone through several times.

    Paths that are bytes are decoded, and iterators, as those of `pathlib.Path.glob`, become lists.

    Raises:
        TypeError: it is neither a path nor several; the message has the first item that is none.
    """
    if isinstance(source, (str, bytes, os.PathLike)):
        return os.fsdecode(source)
    if isinstance(source, Mapping):
        raise TypeError(f"source={shown(source)} is a dict: make a data set for each of its values, or pass a list")
    is_several = isinstance(source, (Collection, Iterator)) and not isinstance(source, (torch.Tensor, bytearray))
    if not is_several or hasattr(source, "read"):
        raise TypeError(f"source={shown(source)} must be a path, a directory, a glob, or a list of these")
    paths = list(source)
    kinds = set(map(type, paths))
    if not all(issubclass(kind, (str, bytes, os.PathLike)) for kind in kinds):
        i, wrong = next((i, one) for i, one in enumerate(paths) if not isinstance(one, (str, bytes, os.PathLike)))
        raise TypeError(
            f"source={shown(source)} must be a path, a directory, a glob, or a list of these, and its item {i} is "
            f"{shown(wrong)}"
        )
    if any(issubclass(kind, bytes) for kind in kinds):
        return [os.fsdecode(one) for one in paths]
    return paths


def check_types(
    batch_size: object,
    format: object,
    seed: object,
    drop_last: object,
    transform: object,
    fields: Fields,
    reading: Reading,
) -> None:
    """Refuse arguments of `GDSDataset` of a wrong type, before they are used.

    Raises:
        TypeError: one is.
    """
    if format is not None:
        _check_format(format)
    for name, number in (("batch_size", batch_size), ("seed", seed), ("prefetch", reading.prefetch)):
        whole_number(name, number)
    flag("drop_last", drop_last)
    flag("zero_copy", reading.zero_copy)
    for name, function in (("transform", transform), ("collate", fields.collate)):
        if function is not None and not callable(function):
            raise TypeError(f"{name}={shown(function)} must be a function, called with a batch's values")
    decode = fields.decode
    if decode is not None and not isinstance(decode, Mapping):
        raise TypeError(f'decode={shown(decode)} must be a dict by the names of fields, as in {{"jpg": "image"}}')
    options_of(reading.options)
    if reading.cache is not None and not isinstance(reading.cache, (str, os.PathLike)):
        raise TypeError(f"cache={shown(reading.cache)} must be the path of a folder, or None")
    if reading.cache_bytes is not None and not isinstance(reading.cache_bytes, (int, str)):
        raise TypeError(f'cache_bytes={shown(reading.cache_bytes)} must be a number of bytes, or as in "500GiB"')
    if reading.storage_options is not None and not isinstance(reading.storage_options, Mapping):
        raise TypeError("storage_options= must be a dict by the names of a store's options")
    if reading.index_cache is not None and not isinstance(reading.index_cache, (str, os.PathLike)):
        raise TypeError(f'index_cache={shown(reading.index_cache)} must be "user", the path of a folder, or None')


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse arguments that `GDSDataset` does not have.

    Raises:
        TypeError: there is one; the message has the remedy if it is an argument of a DataLoader.
    """
    for name in names:
        remedy = _OF_A_DATALOADER.get(name)
        what = "" if remedy is None else f", which is one of a DataLoader: {remedy}"
        raise TypeError(f"GDSDataset() got an unexpected keyword argument {name!r}{what}")


def _check_format(format: object) -> None:
    names = sorted(entry.name for entry in FORMATS)
    if isinstance(format, str):
        meant = [name for name in names if name.lower() == format.lower()]
        remedy = f"pass gdsdata.formats.{meant[0]}(...)" if meant else f"it is one of {', '.join(names)}"
        raise TypeError(f"format={format!r} must be an object of gdsdata.formats: {remedy}")
    if isinstance(format, type):
        raise TypeError(f"format={format.__name__} is a class: write {format.__name__}() with its arguments")
    has_other_index = type(format) in (bytes, list, tuple, torch.Tensor)  # it finds a value
    if has_other_index or not callable(getattr(format, "index", None)):
        raise TypeError(f"format={shown(format)} must be one of gdsdata.formats, or have a method index(paths)")


def check_values(fields: Fields, reading: Reading, device: torch.device, on_error: str) -> None:
    """Refuse arguments of `GDSDataset` that are out of range.

    Raises:
        ValueError: one is.
    """
    residency, ragged = reading.residency, fields.ragged
    if not reaches(device):
        raise ValueError(
            f'device={device}: batches are made on the CPU and on CUDA devices: pass "cpu", and move each batch'
        )
    if reading.prefetch < 1:
        raise ValueError(f"prefetch={reading.prefetch}: at least one batch has to be in flight")
    if reading.prefetch > _LARGEST_PREFETCH:
        raise ValueError(f"prefetch={reading.prefetch}: at most {_LARGEST_PREFETCH} batches are read ahead: use fewer")
    if reading.index_cache == "":
        raise ValueError("index_cache='' is empty: give \"user\", the path of a folder, or None")
    if residency not in (None, "pinned"):
        raise ValueError(f'residency={residency!r} must be None or "pinned"')
    if residency is not None and device.type != "cuda":
        raise ValueError(f'residency="pinned" is for CUDA devices: on {device} files are mapped anyway')
    if ragged != "flat":
        from gdsdata.data.batches.ragged import check_ragged_as

        check_ragged_as(ragged)
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error={on_error!r} is none of 'raise', 'skip'")


def check_interval(report_every_s: object) -> None:
    """Refuse an interval that is none.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or not a number (NaN).
    """
    if report_every_s is None:
        return
    if not isinstance(report_every_s, (int, float)) or isinstance(report_every_s, bool):
        raise TypeError(f"report_every_s={shown(report_every_s)} must be a number of seconds, or None")
    if not report_every_s >= 0:
        raise ValueError(f"report_every_s={report_every_s}: give 0 or more seconds, or None")


def remote_of(source: Source, reading: Reading) -> RemoteSettings | None:
    """Return how the objects of ``source`` are reached, as they are from now on.

    None: it has no URL.

    Raises:
        ValueError: ``cache_bytes`` is no size, or a store has no such option.
    """
    sources = sources_of(source)
    if not have_urls(sources):
        return None
    from gdsdata.storage.settings import RemoteSettings

    settings = RemoteSettings.of(sources, reading.cache, reading.cache_bytes, reading.storage_options)
    settings.take_effect()
    return settings


def skipped_of(on_error: str) -> Skipped | None:
    """Return the object that notes bad samples; None: they are errors."""
    if on_error == "raise":
        return None
    from gdsdata.data.batches.skipped import Skipped

    return Skipped()


def decoders_of(decode: Mapping[str, str | Decoder | Image] | None) -> dict[str, Decoder | Image]:
    """Return the decoders of ``decode=``, by the names of their fields.

    Raises:
        ValueError: one is of no name that is known, and no function.
        ImportError: one needs an extra that is not installed.
    """
    if not decode:
        return {}
    from gdsdata.decoders import decoder_of

    return {name: decoder_of(said) for name, said in decode.items()}


def peers_of(sharding: Sharding, fields: Fields, decode: Mapping[str, Decoder | Image]) -> Peers | None:
    """Return the processes that read batches together with this one; None: it reads alone.

    Raises:
        TypeError: ``share_reads`` is another value than True and False.
        ValueError: there is no mesh that says which these are, or batches are made of values that
            cannot be gathered.
    """
    if not flag("share_reads", sharding.share_reads):
        return None
    mesh = sharding.device_mesh
    if mesh is None:
        raise ValueError(
            "share_reads=True: a mesh says which processes get the same batches: pass device_mesh= and dp_dim= in "
            "sharding=gdsdata.Sharding(...), or leave share_reads out"
        )
    ranks = peers_in(mesh, sharding.dp_dim)
    if len(ranks) == 1:
        return None
    if fields.collate is not None:
        raise ValueError(
            "share_reads=True gathers tensors, and collate= would get a part of each batch: make batches in "
            "transform=, which gets whole ones"
        )
    from gdsdata.decoders import Image, decode_cls

    for name, decoder in decode.items():
        if decoder is not decode_cls and (not isinstance(decoder, Image) or decoder.resize is None):
            raise ValueError(
                f"share_reads=True gathers tensors of one dtype and shape, and decode[{name!r}] may make others: leave "
                f"it out and decode in transform=, which gets the bytes of whole batches. "
                f'"cls" and gdsdata.decoders.Image(resize=...) can be gathered'
            )
    from gdsdata.collective.peers import Peers

    return Peers(sorted(ranks))


def check_index(
    index: SampleIndex, format: Format, collate: Collate | None, decode: Mapping[str, Decoder | Image]
) -> None:
    """Refuse arguments of `GDSDataset` that do not fit the samples that were found.

    Raises:
        ValueError: one does not.
    """
    if not index.is_even:
        raise ValueError(f"{format}: last windows are shorter, which no batch holds: leave drop_last True")
    if collate is not None and not index.field_names:
        raise ValueError(
            f"collate= is for samples with fields: of {format} a batch is one tensor already, and transform= gets that"
        )
    if lost := sorted(decode.keys() - set(index.field_names)):
        names = sorted(index.field_names)
        raise ValueError(f"decode= names {lost[0]!r}, but the samples' fields are {names or 'none'}")
    if decode:
        from gdsdata.decoders import keep_encoded, runs_ahead

        for field in getattr(index, "fields", ()):
            decoder = decode.get(field.name, keep_encoded)
            if field.element_dtype.itemsize > 1 and decoder is not keep_encoded and runs_ahead(decoder):
                raise ValueError(
                    f"decode= names {field.name!r}, whose values are {field.element_dtype} already: the named decoders "
                    f"are for bytes, so leave it out"
                )


def checked_state(state: object) -> Mapping[str, Any]:
    """Return a state of `GDSDataset`, with what older versions left out.

    Raises:
        TypeError: it is no dict.
        ValueError: it is no state, or of a newer version, or says no position.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a dict that state_dict() returned, and this is a {type(state).__name__}")
    if state.get("version") != 1:
        raise ValueError(f"this is no state of a GDSDataset that this version knows: {state!r}")
    if "sources" in state:
        raise ValueError("the state is of a Mix, and this is a single GDSDataset: pass it to Mix.load_state_dict()")
    position_in(state)
    return {"uneven": "drop", **state}
