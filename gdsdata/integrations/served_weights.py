"""The common parts of the loaders for vLLM and SGLang: settings, files, and the iterator."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gdsdata.checkpoint.safetensors.weights import INDEX_NAME, Weight, find_weights, iterate_weights, open_weights
from gdsdata.collective.transfers import reads_together
from gdsdata.errors import CorruptData
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

LOAD_FORMAT = "gdsdata"
_NUMBERED = re.compile(r"(.*-)(\d{1,9})-of-(\d{1,9})\.safetensors", re.DOTALL)  # "model-00001-of-00003.safetensors"
_ALONE = "rank"
_ONCE = (_ALONE, "node", "job")


class Settings(NamedTuple):
    """The settings in ``--model-loader-extra-config``, as JSON.

    Attributes:
        weights: the folder of the model's weights, if it is another one than that of its
            configuration: a path, or a URL ("s3://bucket/llama/").
        once: "node" or "job": as of `gdsdata.load`. "rank": each rank reads by itself.
    """

    weights: str | None = None
    once: str | None = None

    def folder_of(self, model: str, target: str | None) -> dict[str, str]:
        """Return the folder of a model's weights by its name; empty if it is the model's own.

        A draft model has the settings of its target, but it has weights of its own, unless both
        are in one checkpoint.

        Args:
            model: name or path.
            target: the name or path of a draft's target; None: it is not known. A model that is no
                draft is its own target.
        """
        is_of_target = target is not None and os.path.normpath(model) == os.path.normpath(target)
        return {model: self.weights} if self.weights is not None and is_of_target else {}


def settings_of(extra_config: Any) -> Settings:
    """Return the settings in ``--model-loader-extra-config``.

    Raises:
        ValueError: it has something else, or a wrong value.
    """
    given = dict(extra_config) if isinstance(extra_config, Mapping) else extra_config or {}
    if not isinstance(given, dict) or not set(given) <= set(Settings._fields):
        known = " and ".join(map(repr, Settings._fields))
        raise ValueError(f"model_loader_extra_config={given!r:.200}: load format {LOAD_FORMAT!r} knows {known}")
    wrong = [name for name, value in given.items() if not isinstance(value, str)]
    if wrong:
        raise ValueError(f"model_loader_extra_config: {wrong[0]!r} is {given[wrong[0]]!r:.100}: give a string")
    found = Settings(**given)
    if found.once not in (None, *_ONCE):
        raise ValueError(f"model_loader_extra_config: 'once' is {found.once!r:.100}: give one of {_ONCE}")
    return found


def check_is_not_elsewhere(elsewhere: Mapping[str, str], model: str, what: str) -> None:
    """Check that weights which a framework reads by itself are in the folder of their model.

    Args:
        elsewhere: of `Settings.folder_of`.
        model: name or path.
        what: is read, and by whom.

    Raises:
        ValueError: they are in another folder.
    """
    if model in elsewhere:
        raise ValueError(
            f"{what} itself, which does not know the folder {elsewhere[model]!r}: put the weights into "
            f"the folder of the model {model!r}, and leave 'weights' out of model_loader_extra_config"
        )


def device_of(model: torch.nn.Module) -> torch.device:
    """Return where a model's weights should be read to: a GPU if some of its parameters are there.

    If all are on the meta device, it is the current GPU; without parameters, the CPU.
    """
    devices = {parameter.device for parameter in model.parameters()}
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus and devices and all(device.type == "meta" for device in devices):
        return current_device()
    return engine.resolved(gpus[0] if gpus else "cpu")


def current_device() -> torch.device:
    """Return the current GPU, or the CPU if there is none."""
    return engine.resolved("cuda" if torch.cuda.is_available() else "cpu")


def served_weights(
    files: Sequence[str],
    folder: str,
    device: torch.device,
    *,
    group: object = None,
    once: str | None = None,
    wants: Callable[[str], bool] | None = None,
    is_unused: Callable[[str], bool] | None = None,
    patterns: Sequence[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in some files.

    Args:
        files: paths, that a framework has chosen. Empty: `find_weights` finds them in ``folder``,
            which may be a URL.
        folder: that of the files. If all of them are in it, and it has an index, they are compared
            with that, unless there are ``patterns``.
        device: of the tensors.
        group, wants: see `iterate_weights`.
        once: of `Settings`.
        is_unused: called with a name. Files that have only such names are left out, if others are
            left. None: no file is.
        patterns: of `find_weights`. ``files`` were chosen by them already.

    Raises:
        CorruptData, FileNotFoundError, IoError, ...: see `open_weights` and `iterate_weights`. All
            ranks of ``group`` raise it.
    """
    options = EngineOptions()
    if once == _ALONE:
        group = once = None
    with reads_together(group, once, {"call": "served_weights"}, options.stall_timeout_s):  # shares errors
        weights = _opened(files, folder, is_unused, patterns)
    return iterate_weights(weights, device, wants=wants, group=group, once=once, options=options)


def _opened(
    files: Sequence[str], folder: str, is_unused: Callable[[str], bool] | None, patterns: Sequence[str] | None
) -> list[Weight]:
    index: str | None = None
    are_found = not files
    if files:
        beside = os.path.join(folder, INDEX_NAME)
        are_beside = all(os.path.dirname(path) == os.path.dirname(beside) for path in files)
        index = beside if patterns is None and are_beside and os.path.isfile(beside) else None
    else:
        files, index = find_weights(folder, patterns)
        if index is None and patterns is None:
            _check_no_shard_is_missing(folder, files)
    weights = open_weights(files, index)
    if are_found and index is None:
        _check_names_differ(weights)
    if is_unused is None:
        return weights
    used = {stored.record.path for name, stored in weights if not is_unused(name)}
    return [one for one in weights if one[1].record.path in used] or weights


def _check_no_shard_is_missing(folder: str, files: Sequence[str]) -> None:
    """Check that a folder without an index has all files that their names count.

    Raises:
        FileNotFoundError: it does not.
    """
    numbers: dict[tuple[str, str], set[int]] = {}
    for path in files:
        if found := _NUMBERED.fullmatch(os.path.basename(path)):
            numbers.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (name, count), found_numbers in numbers.items():
        if len(found_numbers) < int(count):
            raise FileNotFoundError(
                f"'{folder}' has {len(found_numbers)} of the {int(count)} files {name}...-of-{count}.safetensors: "
                "fetch the others, and their index"
            )


def _check_names_differ(weights: Sequence[Weight]) -> None:
    """Check that no two files have a tensor of the same name: nothing says which of them is meant.

    Raises:
        CorruptData: two files have one.
    """
    path_of: dict[str, str] = {}
    for name, stored in weights:
        path = stored.record.path
        if path_of.setdefault(name, path) != path:
            raise CorruptData(
                f"'{path_of[name]}' and '{path}' both have a tensor {name!r}, and no index says which one the model "
                f"uses: leave the files of one model in the folder, or put its {INDEX_NAME} there",
                path,
            )
