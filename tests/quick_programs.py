"""Python programs that start and end in 0.02 s: forks of a process that has imported torch.

`Popen` is subprocess's; the fixture `quick_programs` puts it in place. If the command is a program
for this interpreter (`-c`, `-m` or a file), a server that has imported torch and gdsdata forks. The
fork takes over the arguments, environment, folder, descriptors and signal mask, and runs the
program as the main module. It is a child of the process that called `Popen`: signals, exit codes
and waiting are those of any child. Start and end cost 0.02 s of CPU time instead of 2.5 s.

A fork's end is short. It waits for threads, runs atexit's functions, frees the program's own
objects, flushes and exits. Python's finalization would also tear down every imported module, for
0.3 s of CPU time. Mark a test `whole_end` if it is about a program's end: its programs then end by
that finalization, because the fixture sets QUICK_PROGRAMS_WHOLE_END in their environment.

If programs of a test module import a framework, `importing` gives them a server that has imported
it: each of them would take seconds for that. This server is a fork of the first one.

A fork differs from a new interpreter in two ways: modules are imported already, and all programs
share one seed of hashes. Mark a test `new_interpreter` if it is about imports, the cost of a start
or that seed. A new interpreter also starts if the command has an option of Python's (`-W`), or if
its environment has a setting that is read only at a start (PYTHONWARNINGS, LD_PRELOAD) and that
this process lacks. To fork with such a setting, put it into `os.environ`: another server starts.
Forks follow OMP_NUM_THREADS and PYTHONDONTWRITEBYTECODE by themselves.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[1]
PATHS_AT_START = tuple(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
MODULES = ("torch.utils.data", "torch.distributed.checkpoint", "torch.distributed.run")
GDSDATA = ("gdsdata", "gdsdata.data.dataset", "gdsdata.formats.records", "gdsdata.checkpoint.background.checkpointer")
GDSDATA += ("gdsdata.checkpoint.loading", "gdsdata.checkpoint.torch_zip.archive_writer", "gdsdata.bench.measure.system")
# Python, the loader and the libraries of threads read these when a process starts.
START_SETTINGS = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "QUICK_PROGRAMS_IMPORTS")
# A fork follows these by itself.
FOLLOWED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
PR_SET_CHILD_SUBREAPER = 36
MOST_PASSED = 16  # descriptors beside the standard ones
FREE_DESCRIPTOR = 500  # a program has fewer of its own
# In a program's environment:
NESTED = "QUICK_PROGRAMS_NESTED"  # the programs that it starts are forks too
WHOLE_END = "QUICK_PROGRAMS_WHOLE_END"  # it ends by Python's own finalization
IMPORTS = "QUICK_PROGRAMS_IMPORTS"  # more modules that its server has imported

_NewProcess = subprocess.Popen  # the fixture replaces the name in subprocess


class Popen(_NewProcess):
    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in (env or os.environ).items()}
        if executable or preexec_fn or not can_be_forked(args, environment):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        pipes = rest[3:9]  # stdin, stdout and stderr: each the end to read from and the end to write to
        from_stdin, to_stdout, to_stderr = pipes[0], pipes[3], pipes[5]
        descriptors = [own if asked == -1 else asked for own, asked in enumerate((from_stdin, to_stdout, to_stderr))]
        unbuffered, arguments = _without_unbuffered(args[1:])
        program = {
            "arguments": arguments,
            "unbuffered": unbuffered,
            "passed": list(pass_fds),
            "environment": environment,
            "folder": os.fsdecode(cwd or os.getcwd()),
            "new_session": bool(rest[-1] if sys.version_info < (3, 11) else rest[-2]),
            "blocked_signals": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
            "ignores_interrupts": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        }
        self.pid = _server().start(program, [*descriptors, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def can_be_forked(command: Sequence[Any], environment: Mapping[str, str]) -> bool:
    if isinstance(command, str | bytes) or os.fsdecode(command[0]) != sys.executable:
        return False
    _, arguments = _without_unbuffered(command[1:])
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m")):
        return False
    return _settings(environment) == _settings(os.environ)


@contextlib.contextmanager
def importing(*modules: str) -> Iterator[None]:
    """Start programs meanwhile as forks of a server that has imported these modules, too."""
    before = os.environ.pop(IMPORTS, None)
    if modules:
        os.environ[IMPORTS] = " ".join(modules)
    try:
        yield
    finally:
        if modules:
            _servers.pop(_settings_now(), None)
            del os.environ[IMPORTS]
        if before is not None:
            os.environ[IMPORTS] = before


def _without_unbuffered(arguments: Sequence[Any]) -> tuple[bool, list[str]]:
    """Return whether the option -u stands first, and the arguments without it."""
    texts = list(map(os.fsdecode, arguments))
    return texts[:1] == ["-u"], texts[1:] if texts[:1] == ["-u"] else texts


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    names = [name for name in environment if name.startswith(START_SETTINGS) and name not in FOLLOWED]
    return {name: environment[name] for name in names}


# ------------------------------------------------------------------------------------------------ the server's client


class Server:
    """The process that forks. It ends with this one, or when this object is dropped."""

    def __init__(self, requests: socket.socket) -> None:
        self._lock = threading.Lock()
        self._requests = requests
        self.owner = os.getpid()

    @classmethod
    def started(cls, modules: Sequence[str]) -> "Server":
        requests, theirs = socket.socketpair()
        begin = f"exec(*__import__('quick_programs').serve({modules}))"
        paths = [str(Path(__file__).parent), str(REPOSITORY), *PATHS_AT_START]  # torch may be in one of them
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), WHOLE_END: "1"}
        for name in ("OMP_NUM_THREADS", NESTED, IMPORTS):
            environment.pop(name, None)
        server = cls(requests)
        with importing():  # a server with modules of its own is a fork of the one without
            server._process = (Popen if modules else _NewProcess)(
                [sys.executable, "-c", begin], env=environment, stdin=theirs, stdout=subprocess.DEVNULL
            )
        theirs.close()
        return server

    def start(self, program: dict, descriptors: list[int]) -> int:
        """Fork a child of this process that runs the program, and return its id."""
        with self._lock, tempfile.TemporaryFile() as request, _adopts_orphans():
            request.write(json.dumps(program).encode())
            request.flush()
            socket.send_fds(self._requests, [b"?"], [request.fileno(), *descriptors])
            answer = self._requests.recv(8)
        assert answer, "the server of forks ended"
        return int.from_bytes(answer, "little")


_servers: dict[frozenset[tuple[str, str]], Server] = {}  # by the settings of their start


def _settings_now() -> frozenset[tuple[str, str]]:
    return frozenset(_settings(os.environ).items())


def _server() -> Server:
    settings = _settings_now()
    if settings not in _servers or _servers[settings].owner != os.getpid():
        _servers[settings] = Server.started(os.environ.get(IMPORTS, "").split())
    return _servers[settings]


@contextlib.contextmanager
def _adopts_orphans() -> Iterator[None]:
    """Become the parent of the program: the server's child forks it and ends."""
    _be_subreaper(True)
    try:
        yield
    finally:
        _be_subreaper(False)


def _be_subreaper(value: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


# ------------------------------------------------------------------------------------------------ the server itself


def serve(modules: Sequence[str]) -> tuple[CodeType, dict[str, Any]]:
    """Fork for each request. Returns a program and its globals, in a fork with a whole end.

    Any other fork runs its program here. The server ends when its socket is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the programs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*MODULES, *GDSDATA, *modules):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the end of a program collects only its own objects
    program = _fork_for(socket.socket(fileno=os.dup(0)))
    # A new main module: the collector does not free what the frozen one refers to.
    first, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    if hasattr(first, "__file__"):
        sys.modules["__main__"].__file__ = first.__file__
    return (program, vars(sys.modules["__main__"])) if os.environ.get(WHOLE_END) else _run_with_a_short_end(program)


def _fork_for(requests: socket.socket) -> CodeType:
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 4 + MOST_PASSED)
        if not descriptors:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            passing = os.getpid()
            if child := os.fork():
                os.write(writer, child.to_bytes(8, "little"))
                os._exit(0)
            for descriptor in (reader, writer, requests.detach()):
                os.close(descriptor)
            while os.getppid() == passing:  # until the program has the parent that asked for it
                time.sleep(0.0005)
            return _become(*descriptors)
        os.waitpid(between, 0)
        requests.send(os.read(reader, 8))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _run_with_a_short_end(program: CodeType) -> NoReturn:
    weakref.finalize._registry = {}  # without those of torch, which would touch 8,000 pages at the end
    status, interrupted = 0, False
    try:
        exec(program, vars(sys.modules["__main__"]))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
        sys.excepthook(type(error), error, error.__traceback__.tb_next)
    threading._shutdown()
    atexit._run_exitfuncs()
    if threading.active_count() == 1:  # a daemon thread may still use them
        del sys.modules["__main__"]
        gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except ValueError:  # closed
            pass
        except OSError:
            status = status or 120  # as Python does
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 255)


def _own_server() -> socket.socket | None:
    """Fork a server for the programs of this program. Returns its socket in the server."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        _servers.clear()
        _servers[_settings_now()] = Server(ours)
        for module in list(sys.modules.values()):  # torch.distributed.elastic has imported the name
            if vars(module).get("Popen") is _NewProcess:
                module.Popen = Popen
        return None
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    return theirs


def _become(request: int, *descriptors: int) -> CodeType:
    with open(request, "rb") as file:
        file.seek(0)
        program = json.load(file)
    received = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE_DESCRIPTOR) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(received, [0, 1, 2, *program["passed"]], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if program["new_session"]:
        os.setsid()
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN if program["ignores_interrupts"] else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, program["blocked_signals"])
    if os.environ.get(NESTED) and (requests := _own_server()):
        return _fork_for(requests)
    if program["unbuffered"]:
        sys.stdout.reconfigure(write_through=True)
    kind, *arguments = program["arguments"]
    ours = {str(Path(__file__).parent), str(REPOSITORY), *PATHS_AT_START}
    paths = [path for path in program["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path and path not in ours)]
    if kind == "-c":
        code, *arguments = arguments
        sys.argv[:] = ["-c", *arguments]
        sys.path.insert(0, "")
        return compile(code, "<string>", "exec")
    if kind == "-m":
        module, *arguments = arguments
        sys.argv[:] = ["-m", *arguments]
        sys.path.insert(0, program["folder"])
        return compile(f"__import__('runpy')._run_module_as_main({module!r})", "<string>", "exec")
    sys.argv[:] = [kind, *arguments]
    sys.path.insert(0, str(Path(kind).resolve().parent))
    vars(sys.modules["__main__"])["__file__"] = kind
    return compile(Path(kind).read_bytes(), kind, "exec")
