"""Run programs that end in the middle of something.

    python interpreter_ends.py FOLDER SECONDS NAME...

Each program runs in a fork of a process that has its imports. The fork runs it as the main module
and reaches the end of this script, where Python finalizes itself. For each name, a line of JSON
goes to stdout: name, exit code (-N: signal N), seconds of the fork, and its stderr. A fork that
takes longer than SECONDS is killed.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch  # noqa: F401 (for programs)
from torch.utils.data import DataLoader  # noqa: F401 (for programs)

import gdsdata
from gdsdata.formats import Records, Tar

warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, from Python 3.12 on
FOLDER = Path(sys.argv[1])
AT_A_TIME = 2


def read(batch_size=4, shuffle=True, **reading):
    records, how = Records("u1", (4096,)), gdsdata.Reading(**reading)
    return gdsdata.GDSDataset(FOLDER / "0.bin", batch_size, records, shuffle, device="cpu", reading=how)


def tar(decode=None, **reading):
    groups = dict(fields=gdsdata.Fields(decode=decode), reading=gdsdata.Reading(**reading))
    return gdsdata.GDSDataset(FOLDER / "0.tar", 4, Tar(index_cache=None), device="cpu", **groups)


def parquet(**reading):
    return gdsdata.GDSDataset(FOLDER / "0.parquet", 4, device="cpu", reading=gdsdata.Reading(**reading))


def begun(dataset):
    """Return an iterator that has given a batch."""
    batches = iter(dataset)
    next(batches)
    return batches


def interrupt_soon(dataset):
    """Send Ctrl-C while the first batch is waited for."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    next(iter(dataset))


def keep_main_module():
    """Hold the main module until Python has ended."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules["__main__"]))


def checkpointer(name):
    return gdsdata.AsyncCheckpointer(FOLDER / name)


HANGS = gdsdata.EngineOptions(direct="always", faults="late=1,late_ms=120000")

# Programs that end well, with exit code 0 and nothing on stderr.
SILENT = {
    "an iterator of records": "batches = begun(read())",
    "an iterator of fields": "batches = begun(tar())",
    "zero-copy batches": "batches = iter(read(zero_copy=True)); held = [next(batches) for _ in range(6)]",
    "a preparation for saves": "c = checkpointer('prepared'); c.prepare({'a': torch.zeros(1 << 26)})",
    "a loader's worker with fields": "batches = begun(DataLoader(tar(), batch_size=None, num_workers=1))",
    # Values in other modules live on while modules are torn down.
    "an iterator in another module": "torch.batches = begun(read())",
    "an iterator of fields in another module": "torch.batches = begun(tar(decode={'txt': 'txt'}))",
    "an iterator of row groups in another module": "torch.batches = begun(parquet())",
    "an iterator of lanes in another module": "torch.batches = begun(read(shuffle='lanes'))",
    "a mix in another module": "torch.batches = begun(gdsdata.Mix([read(), tar()]))",
    # dill keeps the main module, and with it all modules that it has imported: Python clears each.
    "an iterator in a main module that is kept": "batches = begun(read()); keep_main_module()",
    "decoded fields in a main module that is kept": ("batches = begun(tar(decode={'txt': 'txt'})); keep_main_module()"),
    "row groups in a main module that is kept": "batches = begun(parquet()); keep_main_module()",
    "lanes in a main module that is kept": "batches = begun(read(shuffle='lanes')); keep_main_module()",
    "a mix in a main module that is kept": "batches = begun(gdsdata.Mix([read(), tar()])); keep_main_module()",
    "an iterator in a cycle": """
import gc
gc.disable()
batches = [begun(read())]
batches.append(batches)
del batches
""",
    "an exception that holds the iterator": """
try:
    for batch in read():
        raise ZeroDivisionError
except ZeroDivisionError as error:
    torch.kept = error
""",
    "a daemon thread between batches": """
import threading
is_there = threading.Event()
def loop():
    for batch in read():
        is_there.set()
        threading.Event().wait()
threading.Thread(target=loop, daemon=True).start()
is_there.wait()
""",
    "a daemon thread that loops": """
import threading
is_there = threading.Event()
def loop():
    while True:
        for batch in read():
            is_there.set()
threading.Thread(target=loop, daemon=True).start()
is_there.wait()
""",
    "a daemon thread that loops over fields": """
import threading
is_there = threading.Event()
def loop():
    while True:
        for batch in tar(decode={'txt': 'txt'}):
            is_there.set()
threading.Thread(target=loop, daemon=True).start()
is_there.wait()
""",
    "a thread that the program waits for": """
import threading
def loop():
    batches = begun(tar())
    threading.main_thread().join()
    assert sum(1 for batch in batches) == 49
threading.Thread(target=loop).start()
""",
    "reads of an engine that storage does not give": """
engine = gdsdata.Engine(HANGS)
torch.kept = engine, engine.read(FOLDER / "0.bin", torch.empty(4096, dtype=torch.uint8))
""",
    "row groups that are decoded slowly": """
import threading, gdsdata.formats.parquet as module
began, decode = threading.Event(), module.TableIndex.decode
def slowly(self, group, stored):
    began.set()
    time.sleep(2)
    return decode(self, group, stored)
module.TableIndex.decode = slowly
batches = iter(parquet())
began.wait()
""",
    "fields that storage does not give": "batches = iter(tar(options=HANGS))",
    "decoded fields that storage does not give": "batches = iter(tar(options=HANGS, decode={'txt': 'txt'}))",
    "row groups that storage does not give": "batches = iter(parquet(options=HANGS))",
    "a fork of a loop over fields": """
batches = begun(tar())
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    "a save under way": "handle = checkpointer('a').save(1, {'a': torch.zeros(1_000_000)})",
    "a checkpointer in another module": """
import sys
torch.kept = [checkpointer('c')]
torch.kept += [sys.modules[f"gdsdata.checkpoint.background.{name}"] for name in ("folder_lock", "checkpointer")]
torch.kept[0].save(1, {'a': torch.zeros(10)}).result()
""",
    "a failed restore": """
saver = checkpointer('d')
saver.save(1, {'a': torch.zeros(10)}).result()
try:
    saver.restore({'a': torch.zeros(11)})
except ValueError as error:
    torch.kept = error
""",
    "a second checkpointer that was refused": """
saver, other = checkpointer('e'), checkpointer('e')
saver.save(1, {'a': torch.zeros(10)}).result()
try:
    other.save(2, {'a': torch.zeros(10)}).result()
except gdsdata.errors.IoError as error:
    torch.kept = error, saver, other
""",
    "a save and an iterator": "batches = begun(tar()); handle = checkpointer('f').save(1, {'a': torch.zeros(10)})",
}

# Programs that end by an exception: exit code, and last line of stderr, which is a traceback.
LOUD = {
    "an exception in the loop": (
        "for batch in read():\n    raise ZeroDivisionError('mine')",
        1,
        "ZeroDivisionError: mine",
    ),
    "Ctrl-C in the loop": ("for batch in read():\n    os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt"),
    "Ctrl-C in a loop over row groups": (
        "for batch in parquet():\n    os.kill(os.getpid(), signal.SIGINT)",
        -2,
        "KeyboardInterrupt",
    ),
    "Ctrl-C while storage gives no fields": ("interrupt_soon(tar(options=HANGS))", -2, "KeyboardInterrupt"),
    "Ctrl-C while storage gives no row groups": ("interrupt_soon(parquet(options=HANGS))", -2, "KeyboardInterrupt"),
    "Ctrl-C while storage gives no pieces": (
        "interrupt_soon(read(shuffle='lanes', options=HANGS))",
        -2,
        "KeyboardInterrupt",
    ),
    "sys.exit in the loop": ("for batch in read():\n    sys.exit(3)", 3, ""),
    "the teardown of a module": (
        """
class Kept:
    def __del__(self, write=os.write):
        write(2, b"torn down")
torch.kept = Kept()
""",
        0,
        "torn down",
    ),
    "os._exit in the loop": ("for batch in tar():\n    os._exit(4)", 4, ""),
}
PROGRAMS = {**SILENT, **{name: program for name, (program, _, _) in LOUD.items()}}


def outcomes_of(names, most_s):
    """Run the programs. In a fork, returns the program that it has to run."""
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            name, stderr = waiting.pop(0), tempfile.TemporaryFile()  # noqa: SIM115 (closed when the fork has ended)
            pid = os.fork()
            if pid == 0:
                os.dup2(stderr.fileno(), 2)
                os.setpgid(0, 0)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests' parent may have it ignored
                return PROGRAMS[name]
            running[pid] = name, stderr, time.monotonic()
        for pid, (name, stderr, began) in list(running.items()):
            left, status = os.waitpid(pid, os.WNOHANG)
            if not left and time.monotonic() < began + most_s:
                continue
            if not left:
                os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            stderr.seek(0)
            seconds = time.monotonic() - began
            print(json.dumps([name, os.waitstatus_to_exitcode(status), seconds, stderr.read().decode()]), flush=True)
            stderr.close()
            del running[pid]
        time.sleep(0.01)
    return None


if __name__ == "__main__":
    program = outcomes_of(sys.argv[3:], float(sys.argv[2]))
    if program is not None:
        exec(compile(program, "<program>", "exec"))
