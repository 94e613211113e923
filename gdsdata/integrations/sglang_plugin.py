"""The plug-in by which SGLang knows the load format "gdsdata". It imports little of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gdsdata.integrations.served_weights import LOAD_FORMAT

_CONFIG = "sglang.srt.configs.load_config.LoadConfig"


def register() -> None:
    """Add the load format. SGLang calls this by an entry point, in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_load_format_choices

    add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(f"{_CONFIG}.__post_init__", put_loader, HookType.AROUND)


def put_loader(stock: Callable[..., None], config: Any, *args: Any, **kw: Any) -> None:
    """Run SGLang's ``LoadConfig.__post_init__``, with our loader in the place of the format's name.

    `LoadFormat` is an enum that nobody can add to, but SGLang takes a loader's class as well.
    """
    if isinstance(config.load_format, str) and config.load_format.lower() == LOAD_FORMAT:
        from gdsdata.integrations.sglang import GDSModelLoader  # late: it imports SGLang's loaders

        config.load_format = GDSModelLoader
    stock(config, *args, **kw)
