"""Models of SGLang, read by gdsdata's engine: ``--load-format gdsdata``.

`sglang_plugin` has SGLang know it. Checked with the interfaces of SGLang 0.5.13, 0.5.18 and 0.5.23.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from gdsdata.checkpoint.safetensors.weights import INDEX_NAME
from gdsdata.integrations.overrides import check_overrides
from gdsdata.integrations.served_weights import (
    check_is_not_elsewhere,
    current_device,
    device_of,
    served_weights,
    settings_of,
)
from gdsdata.integrations.versions import importing

with importing("sglang"):
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.distributed import parallel_state
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors

    try:
        from sglang.srt.runtime_context import get_model
    except ImportError:  # SGLang 0.5.13
        from sglang.srt.server_args import get_global_server_args as get_model

__all__ = ["GDSModelLoader"]

_OVERRIDDEN = ("_get_all_weights", "_get_weights_iterator", "_prepare_weights")


class GDSModelLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang declares no types
    """SGLang's loader, with the weights in safetensors files read by gdsdata's engine.

    Everything else is SGLang's own: names of the hub, models of several sources, quantization.
    Weights are read straight to the device, in batches: at most three of 256 MiB are in memory
    besides the model. The ranks of a tensor-parallel group read each byte once, and pass it on.

    ``--model-loader-extra-config`` takes `Settings`, as ``'{"weights": "s3://bucket/llama/"}'``.

    Args:
        load_config: of SGLang.

    Raises:
        ValueError: ``model_loader_extra_config`` has something else.
        RuntimeError: this SGLang has no such methods.
    """

    def __init__(self, load_config: Any) -> None:
        check_overrides(type(self), GDSModelLoader, _OVERRIDDEN, "sglang", "0.5.13 to 0.5.23")
        self._settings = settings_of(load_config.model_loader_extra_config)
        its = copy.copy(load_config)
        its.load_format, its.model_loader_extra_config = LoadFormat.SAFETENSORS, {}
        super().__init__(its)
        self._device: torch.device | None = None
        self._elsewhere: dict[str, str] = {}  # see `Settings.folder_of`

    def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        self._device = device_of(model)
        target = _target_of_drafts() if model_config.is_draft_model else model_config.model_path
        self._elsewhere = self._settings.folder_of(model_config.model_path, target)
        return super()._get_all_weights(model_config, model)

    def _get_weights_iterator(self, source: Any, **others: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors. The ranks of a tensor-parallel group make this call together.

        Raises:
            ValueError: the settings name a folder of weights that SGLang reads itself.
            CorruptData, FileNotFoundError, IoError: a file is damaged, or lacks what the index says
                it has; or it is missing, or cannot be read. All ranks of the group raise it.
            RankLost: another rank has ended.
        """
        is_a_layer = getattr(self.load_config, "draft_model_idx", None) is not None
        if is_a_layer or others.get("resolved_source") is not None:  # SGLang renames, or has files already
            what = "a layer of a draft" if is_a_layer else "a model with startup overlap"
            check_is_not_elsewhere(self._elsewhere, source.model_or_path, f"{what} is read by SGLang")
            return super()._get_weights_iterator(source, **others)
        patterns = getattr(source, "allow_patterns_overrides", None)  # SGLang 0.5.13 has none
        newer = {} if patterns is None else {"allow_patterns_overrides": patterns}
        folder, files, _ = self._prepare_weights(source.model_or_path, source.revision, False, **newer)
        if files and source.model_config is not None:
            files = maybe_add_mtp_safetensors(files, folder, INDEX_NAME, source.model_config.hf_config)
        weights = served_weights(
            files,
            folder,
            self._device or current_device(),
            group=_tensor_parallel_group(),
            once=self._settings.once,
            patterns=patterns,
        )
        return ((source.prefix + name, tensor) for name, tensor in weights)

    def _prepare_weights(self, model_name_or_path: str, *args: Any, **kw: Any) -> tuple[str, list[str], bool]:
        """Return a folder, and its files; none of them if `find_weights` is to find them there."""
        if model_name_or_path in self._elsewhere:
            return self._elsewhere[model_name_or_path], [], True
        return super()._prepare_weights(model_name_or_path, *args, **kw)


def _target_of_drafts() -> str | None:
    try:
        return get_model().model_path
    except ValueError:  # SGLang has no configuration yet
        return None


def _tensor_parallel_group() -> object:
    if not (torch.distributed.is_initialized() and parallel_state.model_parallel_is_initialized()):
        return None
    return parallel_state.get_tp_group().device_group
