"""The types that tensors have in DLPack."""

from __future__ import annotations

import torch

# DLPack has types for them, but torch 2.9 does not accept these. So they travel as bytes.
SMALL_FLOATS = frozenset(
    {
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
    }
)

# DLPack's types (dlpack.h): a code, the bits of an element, and how many elements torch counts as
# one. The codes are 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool.
DLPACK_TYPES = {
    **{getattr(torch, f"int{bits}"): (0, bits, 1) for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"uint{bits}"): (1, bits, 1) for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"float{bits}"): (2, bits, 1) for bits in (16, 32, 64)},
    **{getattr(torch, f"complex{bits}"): (5, bits, 1) for bits in (64, 128)},
    torch.bfloat16: (4, 16, 1),
    torch.bool: (6, 8, 1),
    **dict.fromkeys(SMALL_FLOATS, (1, 8, 1)),
}
