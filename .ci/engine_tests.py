"""Run the engine's own tests as wheels are built: `.ci/engine_tests.py [--arch aarch64]`.

The objects are those of the wheels. Their C++ library is libc++, and everywhere else it is that of
the machine's compiler. qemu-user runs the tests of another processor (`--page-bytes 65536`). For
these it unpacks a C library below build/, and there is no io_uring. Debian's packages googletest
and, for another processor, qemu-user-static are needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import headers
import packing
import wheels

GOOGLETEST = Path("/usr/src/googletest/googletest")
TESTS = Path("tests/cpp")
FAKES = ("cuda", "cufile")


def build(target: wheels.Target, names: list[str], jobs: int) -> Path:
    """Build the tests, and libraries that stand in for NVIDIA's. Return the tests' program."""
    rules = wheels.Rules(target)
    place = rules.folder / "tests"
    flags = ["-Itests/cpp", "-O1", "-g0", "-isystem", str(GOOGLETEST / "include"), "-I", str(GOOGLETEST)]
    is_fake = {TESTS / f"fake_{name}.cpp" for name in FAKES}
    helpers = {TESTS / "fakes.cpp"}
    chosen = {TESTS / name for name in names} | helpers if names else set(TESTS.glob("*.cpp"))
    sources = sorted(chosen - is_fake)
    sources += [GOOGLETEST / "src" / "gtest-all.cc", GOOGLETEST / "src" / "gtest_main.cc"]
    own = [*sources, Path("csrc/python/lease.cpp")]  # the only one there that needs no Python
    program = place / "engine_tests"
    # Tests put functions of their own in the place of the C library's.
    tests = rules.objects(own, place, [*flags, "-fvisibility=default"], {})
    rules.link(program, [*rules.common_objects(), *tests], ["-pthread", "-ldl"])
    for name in FAKES:
        made = rules.objects([TESTS / f"fake_{name}.cpp"], place, [*flags, "-fvisibility=default"], {})
        rules.link(place / f"libfake{name}.so", made, ["-shared", "-ldl"])
    rules.build(jobs)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", metavar="base_test.cpp", help="files of tests/cpp, default: all")
    parser.add_argument("--arch", choices=("x86_64", "aarch64"), default=os.uname().machine)
    parser.add_argument("--page-bytes", type=int, default=4096, choices=(4096, 16384, 65536), help="that qemu-user has")
    parser.add_argument("--filter", default="*", help="as of GTEST_FILTER")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    is_here = arguments.arch == os.uname().machine
    qemu = shutil.which(f"qemu-{arguments.arch}-static") or shutil.which(f"qemu-{arguments.arch}")
    if not (is_here or qemu) or not GOOGLETEST.exists():
        raise SystemExit("engine_tests: apt-get install qemu-user-static googletest")
    os.chdir(wheels.ROOT)
    os.environ.setdefault("SOURCE_DATE_EPOCH", packing.commit_time())
    program = build(wheels.Target(arguments.arch), arguments.tests, arguments.jobs)
    environment = dict(os.environ)
    if not is_here:
        environment["QEMU_PAGESIZE"] = str(arguments.page_bytes)
        environment["QEMU_LD_PREFIX"] = str(headers.debian_package("libc6", arguments.arch))
    command = [program, "--gtest_brief=1", f"--gtest_filter={arguments.filter}"]
    raise SystemExit(subprocess.run(command if is_here else [qemu, *command], env=environment).returncode)


if __name__ == "__main__":
    main()
