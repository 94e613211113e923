"""gdsdata's ways to read or write one tensor, and those of plain Python.

A peer is a class: `Peer(path, tensor_bytes, state, device, engine)` may keep memory. `read()` gives
a uint8 tensor on the device with the file's first `tensor_bytes` bytes, and opens the file within
it, as a program does that wants one tensor. `write(tensor)` returns when the bytes are on storage:
in state `replaced` in a new file that then takes the old one's name, which a crash cannot leave
half done, and in state `in_place` over the bytes of a file that is there. `served()` counts bytes
by path, where the library does.
"""

import contextlib
import os

import torch

from gdsdata.bench import case, device, limits
from gdsdata.bench.data import read_exactly
from gdsdata.bench.load_peers import engine_of
from gdsdata.bench.measure import PAGE

STATES = {"read": ("warm", "cold"), "write": ("replaced", "in_place")}


class LatencyPeer:
    key = ""  # its name in case.rows
    name = ""
    setting = ""  # one sentence for the report
    package = ""  # what has to be installed
    way = ""  # how its bytes go, where it does not count them: "" is by read and write
    work = ("read", "write")
    states = ("warm", "cold", "replaced", "in_place")
    devices = ("cpu", "cuda")  # where the tensor may be
    tried = False  # case=tensor: only trying shows whether it can be had here
    direct = False  # needs a file system with O_DIRECT

    def __init__(self, path, tensor_bytes, state, device_name, engine=None):
        self.path, self.tensor_bytes, self.state, self.device = path, tensor_bytes, state, device_name
        self.engine = engine or {}

    @classmethod
    def can(cls, work, state, tensor_bytes):
        return work in cls.work and state in cls.states

    @classmethod
    def lacks(cls):
        """Why it cannot be had here, though the package is installed; "" where it can."""
        return ""

    def read(self):
        raise NotImplementedError

    def write(self, tensor):
        raise NotImplementedError

    def served(self):
        return {}

    def close(self):
        pass

    def empty(self):
        return torch.empty(self.tensor_bytes, dtype=torch.uint8, device=self.device)


# ------------------------------------------------------------------------------------------------ gdsdata


class Ours(LatencyPeer):
    key, name = "gdsdata", "gdsdata"
    setting = "gdsdata.read_tensor and write_tensor; with engine.* settings, gdsdata.Engine and a new tensor a read"

    def __init__(self, *arguments):
        import gdsdata

        super().__init__(*arguments)
        self.options = gdsdata.EngineOptions(**self.engine)
        self.shared = engine_of(self.options, self.device, self.path)
        # The two functions take no options.
        self.calls = None if self.options == gdsdata.EngineOptions() else gdsdata.Engine(self.options)

    def read(self):
        import gdsdata

        if self.calls:
            return self.calls.read(self.path, into=self.empty()).result()
        return gdsdata.read_tensor(self.path, torch.uint8, (self.tensor_bytes,), device=self.device)

    def write(self, tensor):
        import gdsdata

        if self.calls:
            self.calls.write(self.path, tensor).result()
        else:
            gdsdata.write_tensor(tensor, self.path)

    def served(self):
        return {path: count for path, count in self.shared.statistics()["bytes"].items() if count}

    def close(self):
        if self.calls:
            self.calls.close()


class OursEngine(Ours):
    key, name = "gdsdata_engine", "gdsdata, Engine"
    setting = "gdsdata.Engine.read into one tensor that is kept, and Engine.write; one call at a time"

    def __init__(self, *arguments):
        import gdsdata

        super().__init__(*arguments)
        self.calls = self.calls or gdsdata.Engine(self.options)
        self.tensor = self.empty()

    def read(self):
        return self.calls.read(self.path, into=self.tensor).result()


# ------------------------------------------------------------------------------------------------ plain Python


class Python(LatencyPeer):
    """open, readinto into a new tensor; open, write, fsync."""

    key, name = "python", "Python"
    setting = "open and readinto into a new tensor; open, write, fsync (replaced: rename and fsync of the folder too)"
    flags = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # Where bytes stop over on their way to a GPU and from it: kept, as a program would that
        # knows what it costs.
        self.pinned = device.pinned(self.tensor_bytes, torch.uint8) if device.is_cuda(self.device) else None

    def read(self):
        host = self.empty() if self.pinned is None else self.pinned
        with open(self.path, "rb", buffering=0) as file:
            read_exactly(file, host)
        return host if self.pinned is None else device.send(host, self.device)

    def write(self, tensor):
        self.store(memoryview(self.on_host(tensor).numpy()))

    def on_host(self, tensor):
        return tensor if self.pinned is None else self.pinned.copy_(tensor)

    def store(self, view):
        if self.state == "in_place":
            self.put(self.path, os.O_WRONLY, view)
            return
        with replaced(self.path) as temporary:
            self.put(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, view)

    def put(self, path, flags, view):
        fd, done = os.open(path, flags | self.flags, 0o644), 0
        try:
            while done < len(view):
                done += os.write(fd, view[done:])
            os.fsync(fd)
        finally:
            os.close(fd)


class PythonDirect(Python):
    """The same past the page cache; the aligned memory that O_DIRECT wants is kept."""

    key, name = "python_direct", "Python, O_DIRECT"
    setting = "the same with O_DIRECT, and one read or write call by way of aligned memory that is kept"
    way = "O_DIRECT"
    states = ("cold", "replaced", "in_place")
    direct = True
    flags = os.O_DIRECT

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.pinned is not None and self.tensor_bytes % PAGE == 0:  # which begins at a page
            self.memory, self.aligned = self.pinned.numpy(), self.pinned
        else:
            _, self.memory = limits.huge_pages(-(-self.tensor_bytes // PAGE) * PAGE)
            self.aligned = torch.from_numpy(self.memory)[: self.tensor_bytes]

    @classmethod
    def can(cls, work, state, tensor_bytes):
        # Writes must end at a page too; a read may ask for more than there is.
        return super().can(work, state, tensor_bytes) and (work == "read" or tensor_bytes % PAGE == 0)

    def read(self):
        fd, done = os.open(self.path, os.O_RDONLY | os.O_DIRECT), 0
        try:
            while done < self.tensor_bytes:
                got = os.preadv(fd, [memoryview(self.memory)[done:]], done)
                if not got:
                    raise EOFError(f"{self.path}: {self.tensor_bytes - done} bytes are missing at its end")
                done += got
        finally:
            os.close(fd)
        return self.aligned if self.pinned is None else device.send(self.aligned, self.device)

    def on_host(self, tensor):
        return self.aligned.copy_(tensor)


@contextlib.contextmanager
def replaced(path):
    """The name of a file to write and sync: then it takes the path's name, and that is on storage too."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        yield temporary
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(os.path.dirname(path))


def sync(path):
    """A file's bytes, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


ROWS = [Ours, OursEngine, Python, PythonDirect]


def find(key):
    return case.find(key, ROWS)
