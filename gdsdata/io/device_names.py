"""Devices by their names."""

from __future__ import annotations

import torch

from gdsdata.errors import BackendUnavailable


def device_of(device: torch.device | str) -> torch.device:
    """Return the device of a name; a device itself is returned as it is.

    Raises:
        BackendUnavailable: torch knows no device of this name.
        TypeError: it is neither a device nor a name.
    """
    try:
        return torch.device(device)
    except (RuntimeError, ValueError) as error:  # the second for an index beyond 64 bits
        why = "torch knows no such device: write 'cpu', 'cuda' or 'cuda:1'"
        raise BackendUnavailable(f"device={device!r:.100} cannot be used here: {why}", (why,)) from error
    except TypeError:
        raise TypeError(f"device={device!r:.100} must be a torch.device, or its name, as 'cuda:1'") from None
