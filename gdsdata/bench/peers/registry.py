"""The rows of each case: classes in the modules of their libraries.

`class Row(LoadPeer, serves="load")` registers a row of that case. A row of your own needs no
registration: `case.rows=[gdsdata,package.module:Class]`. `protocols` says what a class of each case
has.
"""

import collections
import functools
import importlib
import importlib.util
import pkgutil
import re

from gdsdata.bench.measure import device

# In the order of a table's rows.
LIBRARIES = (
    "ceiling", "gdsdata.batches", "gdsdata.tensors", "gdsdata.checkpoints", "gdsdata.replicas", "gdsdata.transfers",
    "gdsdata.remote", "by_hand.windows", "by_hand.volumes", "by_hand.files", "by_hand.gathered", "dali",
    "torch_dataloader", "shards", "ffcv", "spdl", "torch_checkpoints", "safetensors", "checkpoint_libraries",
    "safetensors_loaders", "kvikio", "torch_gds", "deepnvme", "orbax", "object_clients", "remote_checkpoints",
)  # fmt: skip
REGISTERED: dict[str, list] = collections.defaultdict(list)  # classes by case


def derived(base, serves="", **attributes):
    """Make the class of a row that differs from `base` by attributes alone."""
    return type(base)(base.__name__, (base,), {"__module__": base.__module__} | attributes, serves=serves)


@functools.cache
def registered(case):
    modules = [importlib.import_module(f"gdsdata.bench.peers.{name}").__name__ for name in LIBRARIES]
    return sorted(REGISTERED[case], key=lambda peer: modules.index(peer.__module__))


def rows(case, kind=None, cache=None, device_name="cpu"):
    """Return the classes for a kind of work and page cache (None: any) on a device."""
    on_gpu = device.is_cuda(device_name)
    fitting = [
        peer
        for peer in registered(case)
        if ("cuda" if on_gpu else "cpu") in peer.devices
        and (kind is None or not peer.kinds or kind in peer.kinds)
        and (cache is None or not peer.caches or cache in peer.caches)
    ]
    return [variant for peer in fitting for variant in peer.variants(on_gpu)]


def find(case, key, kind=None):
    """Return the class of a row's key, also of dataloader_8 and package.module:Class.

    Raises:
        ValueError: there is none; the message names those that there are.
    """
    if ":" in key:
        return pkgutil.resolve_name(key)
    known = {peer.key: peer for peer in registered(case) if kind is None or not peer.kinds or kind in peer.kinds}
    shown = {peer.key: peer for name in ("cpu", "cuda") for peer in rows(case, kind, None, name)}
    if key in known or key in shown:
        return shown.get(key) or known[key]
    counted = re.fullmatch(r"(\w+)_(\d+)", key)
    if counted and hasattr(known.get(counted[1]), "with_workers"):
        return known[counted[1]].with_workers(int(counted[2]))
    raise ValueError(
        f"case.rows: there is no row {key!r}; there are {', '.join(shown)}, and package.module:Class for yours"
    )


def missing(peer):
    """Why the row cannot be measured here; "" if it can."""
    if peer.package and not installed(peer.package):
        return f"the package {peer.package} is not installed"
    return peer.lacks()


def installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package above it
        return False
