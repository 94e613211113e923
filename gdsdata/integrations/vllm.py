"""Models of vLLM, read by gdsdata's engine: ``vllm serve llama/ --load-format gdsdata``.

vLLM finds `register` by an entry point of this package. Checked with the interfaces of vLLM 0.14,
0.23 and 0.33.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from gdsdata.integrations.overrides import check_overrides
from gdsdata.integrations.served_weights import (
    LOAD_FORMAT,
    check_is_not_elsewhere,
    current_device,
    device_of,
    served_weights,
    settings_of,
)
from gdsdata.integrations.versions import importing

with importing("vllm"):
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    try:
        from vllm.model_executor.model_loader.csf_scales import decode_csf_scale_streams
    except ModuleNotFoundError:  # vLLM 0.33 has none
        decode_csf_scale_streams = iter

__all__ = ["GDSModelLoader", "register"]

_OVERRIDDEN = ("get_all_weights", "_get_weights_iterator", "_prepare_weights")


def register() -> None:
    """Have vLLM know the load format "gdsdata". It may be called again."""
    register_model_loader(LOAD_FORMAT)(GDSModelLoader)


class GDSModelLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's loader, with the weights in safetensors files read by gdsdata's engine.

    Everything else is vLLM's own: names of the hub, models of several sources, the choice of
    experts, and the check that all parameters were loaded. Weights are read straight to the
    device, in batches: at most three of 256 MiB are in memory besides the model. The ranks of a
    tensor-parallel group read each byte once, and pass it on.

    ``--model-loader-extra-config`` takes `Settings`, as ``'{"weights": "s3://bucket/llama/"}'``.

    Args:
        load_config: of vLLM.

    Raises:
        ValueError: ``model_loader_extra_config`` has something else.
        RuntimeError: this vLLM has no such methods.
    """

    def __init__(self, load_config: Any) -> None:
        check_overrides(type(self), GDSModelLoader, _OVERRIDDEN, "vllm", "0.14 to 0.33")
        self._settings = settings_of(load_config.model_loader_extra_config)
        its = copy.copy(load_config)
        its.load_format, its.model_loader_extra_config = "safetensors", {}
        super().__init__(its)
        self._device: torch.device | None = None
        self._elsewhere: dict[str, str] = {}  # see `Settings.folder_of`

    def download_model(self, model_config: Any) -> None:
        """Fetch a model of the hub, unless the settings name a folder of its weights."""
        self._note_weights(model_config)
        if not self._elsewhere:
            super().download_model(model_config)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors. vLLM loads a model from them, and reloads it.

        The ranks of a tensor-parallel group iterate together, to the end.

        Raises:
            ValueError: the settings name a folder, and the checkpoint is one of torchao.
            CorruptData, FileNotFoundError, IoError: a file is damaged, or lacks what the index says
                it has; or it is missing, or cannot be read. All ranks of the group raise it.
            RankLost: another rank has ended.
        """
        self._note_weights(model_config)
        self._device, self.counter_before_loading_weights = device_of(model), time.perf_counter()
        return super().get_all_weights(model_config, model)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if self.load_config.safetensors_load_strategy == "torchao":  # vLLM puts these tensors together
            check_is_not_elsewhere(self._elsewhere, source.model_or_path, "a checkpoint of torchao is read by vLLM")
            return super()._get_weights_iterator(source)
        newer = {"subfolder": source.subfolder} if hasattr(source, "subfolder") else {}
        folder, files, *_ = self._prepare_weights(
            model_name_or_path=source.model_or_path,
            revision=source.revision,
            fall_back_to_pt=False,
            allow_patterns_overrides=source.allow_patterns_overrides,
            **newer,
        )
        weights = served_weights(
            files,
            folder,
            self._device or current_device(),
            group=_tensor_parallel_group(),
            once=self._settings.once,
            wants=self._is_local,
            is_unused=getattr(source, "is_unused_weight", None),
            patterns=source.allow_patterns_overrides,
        )
        return ((source.prefix + name, tensor) for name, tensor in decode_csf_scale_streams(weights))

    def _prepare_weights(self, model_name_or_path: str, *args: Any, **kw: Any) -> tuple[Any, ...]:
        """Return a folder, and its files; none of them if `find_weights` is to find them there."""
        if model_name_or_path in self._elsewhere:
            return os.path.join(self._elsewhere[model_name_or_path], kw.get("subfolder") or ""), []
        return super()._prepare_weights(model_name_or_path, *args, **kw)

    def _note_weights(self, model_config: Any) -> None:
        is_draft = getattr(model_config, "runner_type", "") == "draft"
        target = _target_of_drafts() if is_draft else model_config.model
        self._elsewhere = self._settings.folder_of(model_config.model, target)

    def _is_local(self, name: str) -> bool:
        """Return whether this rank wants a tensor: with expert parallelism, it may be another's."""
        its_experts = getattr(self, "local_expert_ids", None)
        if its_experts is None:
            return True
        from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight  # vLLM 0.14 has none

        return not should_skip_weight(name, its_experts)


def _target_of_drafts() -> str | None:
    speculative = getattr(get_current_vllm_config_or_none(), "speculative_config", None)
    return getattr(getattr(speculative, "target_model_config", None), "model", None)


def _tensor_parallel_group() -> object:
    if not (torch.distributed.is_initialized() and parallel_state.model_parallel_is_initialized()):
        return None
    return parallel_state.get_tp_group().device_group
