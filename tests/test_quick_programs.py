"""To its caller, a fork of `quick_programs` behaves like a new interpreter."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import quick_programs
from helpers import default_interrupts

NEW, FORK = subprocess.Popen, quick_programs.Popen
SAYS = """
import os, sys
print(__name__, sys.argv, os.getcwd(), sorted(os.environ.items()) == sorted(eval(sys.stdin.read()).items()))
print("an error", file=sys.stderr)
"""


def outcome(popen, arguments, **options):
    """Return exit status, output and errors of a program."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "ONE_MORE": "é"}
    with popen([sys.executable, *arguments], text=True, env=environment, **pipes, **options) as program:
        out, errors = program.communicate(repr(environment), timeout=60)
    return program.returncode, out, errors


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(SAYS)
    return str(path)


@pytest.mark.parametrize("kind", ["code", "file", "module"])
def test_a_fork_has_the_arguments_environment_folder_and_pipes_of_a_new_interpreter(program, kind, tmp_path):
    arguments = {"code": ["-c", SAYS], "file": [program], "module": ["-m", "program"]}[kind]
    new, fork = (outcome(popen, [*arguments, "a b", "--c"], cwd=tmp_path) for popen in (NEW, FORK))
    assert new[1].startswith("__main__")
    if kind == "module":  # its own path is argv[0]
        new, fork = ((code, out.replace(program, "-m"), errors) for code, out, errors in (new, fork))
    assert fork == new


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(7)",
        "raise SystemExit('said at the end')",
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'at exit'); print('before')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'))).start()",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); print('before')",
        "import os\nif os.fork(): os.wait()\nelse: raise SystemExit(7)",
        # By os.write: a fork's own end frees no stdout, so what it has in its buffer then is lost.
        "import os\nclass Own:\n    def __del__(self, say=os.write): say(1, b'freed')\nown = [Own()]; own.append(own)",
        "class Own:\n    def __del__(self): raise KeyError('in a destructor')\nown = Own()",
    ],
)
def test_a_fork_ends_as_a_new_interpreter_does(monkeypatch, code):
    def said(popen):
        status, out, errors = outcome(popen, ["-c", code])
        return status, out, re.sub(r" at 0x\w+", "", errors)

    expected = said(NEW)
    assert said(FORK) == expected
    monkeypatch.setenv(quick_programs.WHOLE_END, "1")
    assert said(FORK) == expected


KEPT = """
import os, torch
class Kept:
    def __del__(self, write=os.write):
        write(1, b"torn down")
torch.kept = Kept()
"""


def test_only_a_whole_end_tears_imported_modules_down(monkeypatch):
    assert outcome(FORK, ["-c", KEPT])[:2] == (0, "")
    monkeypatch.setenv(quick_programs.WHOLE_END, "1")
    assert outcome(FORK, ["-c", KEPT])[:2] == outcome(NEW, ["-c", KEPT])[:2] == (0, "torn down")


@pytest.mark.whole_end
def test_a_test_that_is_marked_has_programs_with_whole_ends(quick_programs):
    said = subprocess.run([sys.executable, "-c", KEPT], stdout=subprocess.PIPE, text=True).stdout
    assert said == "torn down"


def test_an_exception_leaves_its_type_and_status():
    code, _, errors = outcome(FORK, ["-c", "raise KeyError('x')"])
    assert code == 1 and errors.rstrip().endswith("KeyError: 'x'")


@pytest.mark.parametrize("whole", ["", "1"])
def test_a_fork_takes_an_interrupt(whole):
    code = "import time; print(flush=True); time.sleep(60)"
    environment = {**os.environ, quick_programs.WHOLE_END: whole}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with default_interrupts(), FORK([sys.executable, "-c", code], env=environment, **pipes) as program:
        program.stdout.readline()
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=60)[1].endswith(b"KeyboardInterrupt\n")
        assert program.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (["ls"], {}),
        ([sys.executable, "-W", "error", "-c", ""], {}),
        ([sys.executable, "-c", ""], {"PYTHONWARNINGS": "error"}),
        ([sys.executable, "-c", ""], {"LD_PRELOAD": "libasan.so"}),
    ],
)
def test_settings_that_a_fork_cannot_have_need_a_new_interpreter(command, environment):
    assert not quick_programs.can_be_forked(command, {**os.environ, **environment})


def test_the_server_has_the_modules_of_this_checkout():
    _, out, _ = outcome(FORK, ["-c", "import sys, gdsdata; print(gdsdata.__file__, 'torch' in sys.modules)"])
    assert out.split() == [str(Path(quick_programs.REPOSITORY, "gdsdata", "__init__.py")), "True"]


@pytest.mark.parametrize("whole", ["", "1"])
def test_programs_share_a_server_that_has_imported_what_they_ask_for(monkeypatch, whole):
    monkeypatch.setenv(quick_programs.WHOLE_END, whole)
    says = "import os, sys; print('mailbox' in sys.modules, sys.argv, os.getppid(), len(sys.path) - len(set(sys.path)))"
    said = lambda: outcome(FORK, ["-c", f"{says}; sys.exit(7)", "an argument"])  # noqa: E731
    without, servers = said(), set(quick_programs._servers)
    assert without == (7, f"False ['-c', 'an argument'] {os.getpid()} 0\n", "")
    with quick_programs.importing("mailbox"):
        assert said() == said() == (7, without[1].replace("False", "True"), "")
        assert len(set(quick_programs._servers) - servers) == 1
    assert said() == without and set(quick_programs._servers) == servers


def test_a_server_finds_modules_where_this_process_found_them(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("VALUE = 7")
    monkeypatch.setattr(quick_programs, "PATHS_AT_START", (str(tmp_path),))
    with quick_programs.importing("only_here"):
        assert outcome(FORK, ["-c", "import sys; print(sys.modules['only_here'].VALUE)"]) == (0, "7\n", "")


FOLLOWS = "import sys, torch; print(sys.dont_write_bytecode, torch.get_num_threads() == 1)"


@pytest.mark.parametrize("settings", [{}, {"PYTHONDONTWRITEBYTECODE": "1"}, {"OMP_NUM_THREADS": "1"}])
def test_a_fork_follows_settings_that_this_process_does_not_have(monkeypatch, settings):
    for name in ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    command, environment = [sys.executable, "-c", FOLLOWS], {**os.environ, **settings}
    assert quick_programs.can_be_forked(command, environment)
    with FORK(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        writes_none, threads = program.communicate(timeout=60)[0].split()
    assert writes_none == str("PYTHONDONTWRITEBYTECODE" in settings)
    assert threads == str("OMP_NUM_THREADS" in settings or os.cpu_count() == 1)


def test_programs_of_a_nested_fork_are_its_children_and_forks():
    asks = "import os, sys; print(os.getppid(), os.getsid(0) == os.getpid(), 'torch' in sys.modules)"
    code = f"import os, subprocess, sys; command = [sys.executable, '-u', '-c', {asks!r}]\n"
    code += "print(os.getpid(), subprocess.run(command, start_new_session=True).returncode)"
    environment = {**os.environ, quick_programs.NESTED: "1"}
    with FORK([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as program:
        inner, outer = program.communicate(timeout=60)[0].splitlines()
        assert inner.split() == [str(program.pid), "True", "True"] and outer.split() == [str(program.pid), "0"]


def test_a_fork_has_the_descriptors_that_are_passed():
    reader, writer = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), b'passed')"
    with FORK([sys.executable, "-c", code, str(writer)], pass_fds=[writer]) as program:
        os.close(writer)
        assert os.read(reader, 10) == b"passed" and os.read(reader, 10) == b""
        assert program.wait() == 0
    os.close(reader)
