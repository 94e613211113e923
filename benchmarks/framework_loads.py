"""The rows of benchmarks/frameworks.py that load models of transformers.

A model's values follow from the names of its tensors, so that every process can compare all of them
with what was saved, on the device, without reading them a second time.
"""

import gc
import json
import threading
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from framework_trainers import imported

from gdsdata.bench.measure import device as devices
from gdsdata.bench.measure import limits, system
from gdsdata.bench.peers.protocols import counted
from gdsdata.io import engine

PIECE = 1 << 24  # values that are compared at a time
SHARDS = 3
FOLLOWED_S = 0.01
OUTSIDE_EXPONENT = ~0x4000  # of a bfloat16: without this bit, it is less than 2 and no NaN


class Model(NamedTuple):
    """A model of transformers in a folder.

    Attributes:
        folder: has the configuration, the shards and their index. device: as torch names it.
        size_bytes: of the weights. cold: they are not in the page cache.
    """

    folder: Path
    device: str
    size_bytes: int
    cold: bool

    @property
    def shards(self):
        return sorted(map(str, self.folder.glob("*.safetensors")))

    @property
    def index(self):
        return self.folder / "model.safetensors.index.json"

    @property
    def on_gpu(self):
        return devices.is_cuda(self.device)


def llama(size_bytes, itemsize):
    """Return the configuration of a model like Llama with about so many bytes of weights."""
    from transformers import LlamaConfig

    width = next((one for one in (4096, 2048, 1024, 512) if 50 * one * one * itemsize < size_bytes / 3), 256)
    vocabulary, wide = 16 * width, 7 * width // 2
    layer = width * (2 * width + width // 2 + 3 * wide)  # values: attention with a quarter of the heads for keys
    layers = round((size_bytes / itemsize - 2 * vocabulary * width) / layer)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=wide,
        num_hidden_layers=max(1, layers),
        num_attention_heads=width // 128,
        num_key_value_heads=max(1, width // 512),
    )


def values(name, begin, end, device):
    """Return the bits of a tensor's values from `begin` to `end`, as int16."""
    numbers = torch.arange(begin, end, dtype=torch.int32, device=device)
    mixed = (numbers ^ (numbers >> 13)) * 668265261 + zlib.crc32(name.encode()) % 2**31
    return (mixed ^ (mixed >> 16)).to(torch.int16) & OUTSIDE_EXPONENT


def pieces(tensor):
    """Yield (begin, end, view) of a tensor's bits."""
    bits = tensor.reshape(-1).view(torch.int16)
    for begin in range(0, len(bits), PIECE):
        yield begin, min(len(bits), begin + PIECE), bits[begin : begin + PIECE]


@torch.no_grad()
def check(model, kind):
    """Compare every value of a loaded model.

    Raises:
        ValueError: a tensor is missing, elsewhere, or not what was saved.
    """
    state = model.state_dict()
    saved = json.loads(kind.index.read_text())["weight_map"]
    if state.keys() != saved.keys():
        raise ValueError(f"the model has other tensors than the files: {sorted(state.keys() ^ saved.keys())[:3]}")
    for name, tensor in state.items():
        if tensor.dtype != torch.bfloat16 or tensor.device.type != torch.device(kind.device).type:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}")
        for begin, end, bits in pieces(tensor):
            if not torch.equal(bits, values(name, begin, end, tensor.device)):
                raise ValueError(f"{name}: the values from {begin} to {end} are not what was saved")


def saving(kind):
    """Return a function that saves the model by transformers alone. It returns the bytes saved."""
    imported("transformers")
    from transformers import LlamaForCausalLM

    @torch.no_grad()
    def turn():
        with torch.device("meta"):
            model = LlamaForCausalLM(llama(kind.size_bytes, 2)).to(torch.bfloat16)
        model.to_empty(device=kind.device)
        for name, tensor in model.state_dict().items():
            for begin, end, bits in pieces(tensor):
                bits.copy_(values(name, begin, end, tensor.device))
        total = sum(one.nbytes for one in model.state_dict().values())
        model.save_pretrained(kind.folder, max_shard_size=-(-total // SHARDS) + total // 50)
        return total

    return turn


# ------------------------------------------------------------------------------------------------------------- rows


def by_stock(kind):
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(kind.folder, device_map=kind.device, dtype=torch.bfloat16)


def by_hooks(kind):
    from gdsdata.integrations.transformers import hooks

    load = by_stock(kind)

    def hooked():
        with hooks():
            return load()

    return hooked


def by_gdsdata(kind):
    from transformers import AutoModelForCausalLM

    from gdsdata.integrations.transformers import from_pretrained

    return lambda: from_pretrained(AutoModelForCausalLM, kind.folder, device_map=kind.device, dtype=torch.bfloat16)


def assigned(kind, read):
    """Return a function that gives what `read` returns to a model without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def load():
        config = AutoConfig.from_pretrained(kind.folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(read(), assign=True)
        with torch.device(kind.device):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its values are not saved
        return model.eval()

    return load


def by_hand(kind):
    import gdsdata

    return assigned(kind, lambda: gdsdata.load(kind.index, kind.device))


def by_hand_stock(kind):
    from safetensors.torch import load_file

    def read():
        state = {}
        for path in kind.shards:
            state |= load_file(path, device=kind.device)
        return state

    return assigned(kind, read)


LIMIT = "limit"
LOADS = {
    "gdsdata `from_pretrained`": by_gdsdata,
    "`from_pretrained` in `hooks()`": by_hooks,
    "`from_pretrained`": by_stock,
    "by hand: `gdsdata.load`, `assign=True`": by_hand,
    "by hand: safetensors `load_file`, `assign=True`": by_hand_stock,
}


class Peak(threading.Thread):
    """While entered, follows the memory of this process.

    Attributes:
        own_bytes: the most that was added, without mapped files. rss_bytes: with them.
    """

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # begins to measure VmHWM anew
        self.before, self.own_bytes, self.over = system.own_bytes("self"), 0, threading.Event()
        self.rss_before = system.kib_in("/proc/self/status", ("VmRSS:",)) * 1024
        self.start()
        return self

    def run(self):
        while not self.over.wait(FOLLOWED_S):
            self.own_bytes = max(self.own_bytes, system.own_bytes("self") - self.before)

    def __exit__(self, *_):
        self.own_bytes = max(self.own_bytes, system.own_bytes("self") - self.before)
        self.rss_bytes = system.kib_in("/proc/self/status", ("VmHWM:",)) * 1024 - self.rss_before
        self.over.set()
        self.join()


def served():
    """Return the bytes by route that gdsdata's engines of this process have moved."""
    return counted(*(one.statistics() for _, one in engine.engines_here()))


def loading(name, kind):
    """Return the function that takes a turn. The first one is the process's first load."""
    imported("transformers")
    from transformers import LlamaForCausalLM  # noqa: F401 - its import is not timed

    devices.open_context(kind.device)
    load = LOADS[name](kind)

    def turn():
        gc.collect()
        devices.synchronize(kind.device)
        devices.forget_peak(kind.device)
        before = served()
        with Peak(daemon=True) as peak:
            cpu_s, began = system.cpu_seconds(), time.perf_counter()
            model = load()
            devices.synchronize(kind.device)
            seconds, cpu_s = time.perf_counter() - began, system.cpu_seconds() - cpu_s
        found = {"seconds": seconds, "cpu_s": cpu_s, "own_bytes": peak.own_bytes, "rss_bytes": peak.rss_bytes}
        found |= {"device_bytes": devices.peak_bytes(kind.device), "served": served() - before}
        check(model, kind)
        return found

    return turn


def limit(kind):
    """Return the function that measures the seconds in which as many bytes can be moved at most."""
    devices.open_context(kind.device)

    def copied():
        source = devices.pinned(devices.PINNED_COPY_BYTES, torch.uint8).zero_()
        target = torch.empty(kind.size_bytes, dtype=torch.uint8, device=kind.device)
        devices.synchronize(kind.device)
        began = time.perf_counter()
        for part in target.split(len(source)):
            part.copy_(source[: len(part)], non_blocking=True)
        devices.synchronize(kind.device)
        return time.perf_counter() - began

    def turn():
        if kind.cold:
            read = limits.sequential_reads(kind.shards)["direct_sequential"]
            if "unavailable" in read:
                raise OSError(read["unavailable"])
            return {"seconds": kind.size_bytes / read["gb_per_s"] / 1e9}
        if kind.on_gpu:
            return {"seconds": copied()}
        return {"seconds": kind.size_bytes / limits.memory_copy(0.5)["gb_per_s"] / 1e9}

    return turn
