"""Load and store a tensor on the CPU and on a GPU: gdsdata beside plain Python.

    python examples/load_store_tensor.py             # 256 MiB in this folder, removed at the end
    python examples/load_store_tensor.py --folder /mnt/nvme --mb-size 1024 --loop 5
    python examples/load_store_tensor.py --validate  # compares every byte of every load and store

Each store is durable when it ends. Before each load the file is dropped from the page cache, unless
--warm is given. For figures to rely on, with other libraries beside, run `python -m gdsdata.bench
case=tensor`. tests/test_examples.py runs this example.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

import gdsdata

MIB = 2**20

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, default=Path("."), help="where the file is made")
parser.add_argument("--mb-size", type=int, default=256, help="size of the tensor in MiB")
parser.add_argument("--loop", type=int, default=3, help="loads and stores of each kind; the median is printed")
parser.add_argument("--validate", action="store_true", help="compare the bytes of every load and store")
parser.add_argument("--warm", action="store_true", help="load from the page cache")
parser.add_argument("--device", action="append", help="default: cpu, and cuda if there is a GPU")


def python_store(tensor, path):
    with open(path, "wb", buffering=0) as file:
        view = memoryview(tensor.cpu().numpy())
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def python_load(path, size_bytes, device):
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    view = memoryview(host.numpy())
    with open(path, "rb", buffering=0) as file:
        while view:
            if not (got := file.readinto(view)):
                raise EOFError(f"{path} ends {len(view):,} bytes before the tensor does")
            view = view[got:]
    return host.to(device)


class Python:
    name = "Python"

    def __init__(self, device):
        self.device = device

    def store(self, tensor, path):
        python_store(tensor, path)

    def load(self, path, size_bytes):
        return python_load(path, size_bytes, self.device)

    def paths(self):
        return "page cache"


class Ours:
    """gdsdata's Engine, which reports the path that served. See also read_tensor, write_tensor."""

    name = "gdsdata"

    def __init__(self, device):
        self.device, self.engine = device, gdsdata.Engine()

    def store(self, tensor, path):
        self.engine.write(path, tensor).result()

    def load(self, path, size_bytes):
        into = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        return self.engine.read(path, into=into).result()

    def paths(self):
        """Name the paths of all loads and stores, other devices' too if they share the engine."""
        served = [name for engine in self.engine.stats().values() for name, count in engine["bytes"].items() if count]
        return ", ".join(dict.fromkeys(served))


def forget(path):
    """Drop the file's pages from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of(work, device):
    started = time.perf_counter()
    result = work()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


def compare(found, tensor, what):
    if not torch.equal(found, tensor):
        raise SystemExit(f"{what}: the bytes are not those of the tensor")


def measure(library, tensor, path, args):
    stores, loads = [], []
    for _ in range(args.loop):
        tensor.add_(1)  # new bytes each time, so those of an earlier store cannot pass for them
        seconds, _ = seconds_of(lambda: library.store(tensor, path), library.device)
        stores.append(seconds)
        if args.validate:
            compare(python_load(path, tensor.nbytes, library.device), tensor, f"{library.name}, store")
        elif args.warm:
            python_load(path, tensor.nbytes, "cpu")
        if not args.warm:
            forget(path)
        seconds, loaded = seconds_of(lambda: library.load(path, tensor.nbytes), library.device)
        loads.append(seconds)
        if args.validate:
            compare(loaded, tensor, f"{library.name}, load")
    store, load = (tensor.nbytes / statistics.median(times) / 1e9 for times in (stores, loads))
    print(f"{library.device:<6} {library.name:<8} store {store:6.2f} GB/s  load {load:6.2f} GB/s  {library.paths()}")


def main():
    args = parser.parse_args()
    if args.loop < 1 or args.mb_size < 1:
        parser.error("--loop and --mb-size must be 1 or more")
    with tempfile.TemporaryDirectory(prefix="load_store_tensor-", dir=args.folder) as folder:
        for device in args.device or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            tensor = torch.randint(0, 256, (args.mb_size * MIB,), dtype=torch.uint8, device=device)
            for library in (Python, Ours):
                measure(library(device), tensor, str(Path(folder) / "tensor.bin"), args)
    if args.validate:
        print("all bytes are right")


if __name__ == "__main__":
    main()
