"""The device of batches and tensors, and CUDA for hand-written loaders."""

import collections
import itertools
import re
import time

import torch

from gdsdata.bench.measure import system

PINNED_COPY_BYTES = 256 * 2**20


def check(name):
    """Raise ValueError if torch cannot use the device of this name."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device.name={name}: use cpu, cuda or cuda:N (N is a number)")
    if name == "cpu":
        return
    if torch.version.cuda is None:
        raise ValueError(f"device.name={name}: torch {torch.__version__} is built without CUDA: use device=cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(f"device.name={name}: torch {torch.__version__} sees no CUDA device: use device=cpu")
    index = torch.device(name).index or 0
    if index >= count:
        raise ValueError(f"device.name={name}: there are {count} CUDA device(s), the last is cuda:{count - 1}")


def lack_of_ranks(name, count):
    """Return why so many ranks cannot have a device each; "" if they can."""
    if not is_cuda(name):
        return ""
    if torch.device(name).index is not None:
        return f"device.name={name}: each rank takes the GPU of its number: use device=cuda"
    if torch.cuda.device_count() < count:
        return f"case.ranks={count}: each rank needs a GPU of its own, and torch sees {torch.cuda.device_count()}"
    return ""


def is_cuda(name):
    return torch.device(name).type == "cuda"


def kind(name):
    """Return what a reader calls it: CPU or GPU."""
    return "GPU" if is_cuda(name) else "CPU"


def index(name):
    """Return the number of a CUDA device; None on the CPU."""
    return (torch.device(name).index or 0) if is_cuda(name) else None


def open_context(name):
    """Make the process's CUDA context, and warm it by a tensor and copies in and out."""
    if is_cuda(name):
        torch.cuda.set_device(index(name))
        torch.ones(1024, pin_memory=True).to(name, non_blocking=True).cpu()


def synchronize(name):
    """Wait for all that was asked of the device; on the CPU nothing is outstanding."""
    if is_cuda(name):
        torch.cuda.synchronize(torch.device(name))


def wait_for_stream(name):
    """Wait for the work of the current stream, and of no other."""
    if is_cuda(name):
        torch.cuda.current_stream(torch.device(name)).synchronize()


def mark(name):
    """Mark the moment at which the current stream gets here; on the CPU, now."""
    if not is_cuda(name):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(torch.device(name)))
    return event


def wait_for(mark):
    """Until the device has got to the mark."""
    if isinstance(mark, torch.cuda.Event):
        mark.synchronize()


def seconds_between(begin, end):
    """Return the seconds between two marks that the device has reached."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000


def reserve(name, size_bytes):
    """Let torch take device memory and keep it for later tensors."""
    if is_cuda(name):
        torch.empty(size_bytes, dtype=torch.uint8, device=name)


def release(name):
    """Release the device memory that torch keeps, for the rows that come after."""
    if is_cuda(name):
        torch.cuda.empty_cache()


def forget_peak(name):
    """Begin to measure `peak_bytes` anew."""
    if is_cuda(name):
        torch.cuda.reset_peak_memory_stats(torch.device(name))


def peak_bytes(name):
    """Return the most that torch's tensors took on the GPU; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(torch.device(name)) if is_cuda(name) else 0


def describe(device):
    """Return the device's fields in results.json."""
    if not is_cuda(device):
        return {"name": device}
    properties = torch.cuda.get_device_properties(torch.device(device))
    driver = system.first_line("/proc/driver/nvidia/version", "NVRM version")
    return {
        "name": device,
        "model": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": next(iter(re.findall(r"\b\d{3}\.\d+(?:\.\d+)?\b", driver)), ""),
    }


# ------------------------------------------------------------------------------------------------ pinned memory


def pinned(shape, dtype):
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def copied_event():
    return torch.cuda.Event()


def send(tensor, name):
    """Return the tensor on the device; copies out of pinned memory are not waited for."""
    return tensor.to(name, non_blocking=True)


def record(event, name):
    """Also right in a thread that was started since: such a thread is on device 0."""
    event.record(torch.cuda.current_stream(torch.device(name)))


def copied_ahead(batches, name, ahead=2):
    """Yield pinned batches on the device, copied ahead on a stream of their own."""
    if not is_cuda(name):
        yield from batches
        return
    beside = torch.cuda.Stream(torch.device(name))

    def copy(batch):
        with torch.cuda.stream(beside):
            return send(batch, name), beside.record_event()

    copies = (copy(batch) for batch in batches)
    flying = collections.deque(itertools.islice(copies, ahead))
    while flying:
        batch, copied = flying.popleft()
        current = torch.cuda.current_stream(torch.device(name))
        current.wait_event(copied)
        batch.record_stream(current)
        yield batch
        flying.extend(itertools.islice(copies, 1))


class PinnedSlots:
    """Pinned buffers in turn: each is used again once the copy out of it has ended."""

    def __init__(self, name, shape, dtype, count=4):
        self.name = name
        self.memory = [pinned(shape, dtype) for _ in range(count)]
        self.copied = [copied_event() for _ in range(count)]
        self.at = -1

    def next(self):
        self.at = (self.at + 1) % len(self.memory)
        self.copied[self.at].synchronize()  # returns at once where nothing was copied yet
        return self.memory[self.at]

    def send(self, part):
        """Return `part` of the buffer used last, on the device."""
        there = send(part, self.name)
        record(self.copied[self.at], self.name)
        return there

    def send_to(self, target, part):
        """Copy `part` into a tensor that is on the device."""
        target.copy_(part, non_blocking=True)
        record(self.copied[self.at], self.name)

    def wait(self):
        """Until all copies have ended: the buffers are then free for others."""
        for copied in self.copied:
            copied.synchronize()


def pinned_copy(device, seconds, to_host=False):
    """Measure GB/s of copies of one pinned buffer to the device, or `to_host`."""
    open_context(device)
    source = pinned(PINNED_COPY_BYTES, torch.uint8)
    source.zero_()
    target = send(source, device)
    if to_host:
        source, target = target, source
    synchronize(device)
    copies, started = 0, time.perf_counter()
    while copies == 0 or time.perf_counter() - started < seconds:
        for _ in range(4):  # enough that the device has the next copy before it ends one
            target.copy_(source, non_blocking=True)
        synchronize(device)
        copies += 4
    elapsed = time.perf_counter() - started
    return {"gb_per_s": copies * PINNED_COPY_BYTES / elapsed / 1e9, "buffer_bytes": PINNED_COPY_BYTES}
