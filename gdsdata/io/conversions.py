"""How the engine converts elements while it copies (csrc/base/convert.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gdsdata.formats.sample import Sample

_WIDENED = {"u1": "u8_to_i64", "u2": "u16_to_i64", "i2": "i16_to_i64", "i4": "i32_to_i64", "u4": "u32_to_i64"}

_FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def conversion_between(stored: torch.dtype, wanted: torch.dtype) -> str | None:
    """Return the conversion that casts one floating-point dtype to another, if there is one.

    Values are those of ``Tensor.to``. A NaN stays one, but its bits may be others.
    """
    if stored == wanted or stored not in _FLOATS or wanted not in _FLOATS:
        return None
    return f"{_FLOATS[stored]}_to_{_FLOATS[wanted]}"


def conversion_on(on_cuda: bool, sample: Sample) -> tuple[str, torch.dtype]:
    """Return how the engine converts each element, and the resulting dtype.

    It widens elements to ``sample.torch_dtype`` on the CPU only: a GPU casts faster, and fewer
    bytes then cross the link.
    """
    conversion = conversion_of(sample)
    if conversion not in _WIDENED.values():
        return conversion, sample.stored_torch_dtype
    return ("none", sample.stored_torch_dtype) if on_cuda else (conversion, sample.torch_dtype)


def conversion_of(sample: Sample) -> str:
    """Return how the engine converts elements while it copies (csrc/base/convert.h)."""
    stored = sample.dtype
    if stored.newbyteorder("=") != stored:
        return f"swap_{stored.itemsize // (2 if stored.kind == 'c' else 1)}"
    if sample.torch_dtype == torch.int64:
        return _WIDENED.get(f"{stored.kind}{stored.itemsize}", "none")
    return "none"
