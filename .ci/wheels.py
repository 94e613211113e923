"""Build gdsdata's wheels for manylinux.

Zig's C++ compiler is a clang with the headers and stubs of every glibc. So the wheels need no newer
glibc than those of torch, whatever this machine has. libc++ and liburing are linked in. Only
csrc/python/ is compiled for each Python. docs/internals/wheels.md has the rest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import headers
import packing

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
GLIBC = (2, 28)  # torch's own wheels need this one
# -Wno-unknown-attributes: gnu::optimize is GCC's. -fwrapv: Python's own flags, which builds from
# source take, have it too, so an overflow wraps in both.
COMPILE = ["-fPIC", "-DNDEBUG", "-fwrapv", "-Wno-unknown-attributes", "-fdebug-compilation-dir=."]
LINK = ["-shared", "-pthread", "-ldl", "-Wl,--build-id=sha1", "-Wl,-z,relro,-z,now", "-Wl,-z,undefs"]
# Without Zig's runtime library, whose memcpy moves 16 bytes at a time: the C library's is faster.
# Nothing else of it is needed, if functions that nobody calls are left out.
LINK += ["-rtlib=none", "-Wl,--gc-sections"]
NINJA = """\
builddir = {folder}
rule cxx
  command = {zig} c++ -target {triple} $flags -MMD -MF $out.d -c $in -o $out
  description = $out
  depfile = $out.d
  deps = gcc
rule link
  command = {zig} c++ -target {triple} $in -o $out $flags
  description = $out
"""


@dataclass(frozen=True)
class Target:
    """The machines that a wheel serves."""

    arch: str

    @property
    def triple(self) -> str:
        return f"{self.arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"

    @property
    def platform(self) -> str:
        return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{self.arch}"

    @property
    def folder(self) -> Path:
        return ROOT / "build" / "wheels" / self.arch


def torch_headers() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("wheels: torch is not installed: its folder include/ has pybind11's headers. Run make wheels")
    return Path(spec.origin).parent / "include"


def quoted(words: list[str]) -> str:
    """Return the words for a shell, within ninja's rules."""
    return shlex.join(words).replace("$", "$$")


class Rules:
    """The rules of ninja for one target. The objects have no name of a folder of this machine."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.uring = headers.liburing(target.arch)
        self.folder = target.folder.relative_to(ROOT)
        extension = packing.distribution().ext_modules[0]
        self.flags = [*extension.extra_compile_args, *COMPILE, "-Icsrc", "-isystem", f"{self.uring}/include"]
        self._names = {ROOT: ".", self.uring: "liburing"}
        zig = quoted([sys.executable, "-m", "ziglang"])
        self._text = NINJA.format(folder=self.folder, zig=zig, triple=target.triple)

    def objects(self, sources: list[Path], place: Path, flags: list[str], known: dict[Path, str]) -> list[str]:
        """Compile sources into objects below `place`, and return these.

        `known` has the names of more folders.
        """
        maps = [f"-ffile-prefix-map={path}={name}" for path, name in {**self._names, **known}.items()]
        made = []
        for source in sources:
            relative = source if source.is_absolute() else source.relative_to(source.parts[0])
            name = (place / relative.as_posix().lstrip("/")).with_suffix(".o").as_posix()
            words = quoted([*self.flags, *flags, *maps])
            self._text += f"build {name}: cxx {source.as_posix()}\n  flags = {words}\n"
            made.append(name)
        return made

    def common_objects(self) -> list[str]:
        """Compile what does not depend on Python."""
        return self.objects([path for path in engine_sources() if not of_python(path)], self.folder / "common", [], {})

    def link(self, name: Path, objects: list[str], flags: list[str], needs: Path | None = None) -> None:
        words = quoted([f"{self.uring}/lib/liburing.a", *flags])
        self._text += f"build {name}: link {' '.join(objects)}{f' | {needs}' if needs else ''}\n  flags = {words}\n"

    def build(self, jobs: int) -> None:
        self.target.folder.mkdir(parents=True, exist_ok=True)
        rules = self.target.folder / "build.ninja"
        rules.write_text(self._text)
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build" / "zig")}
        command = [sys.executable, "-m", "ninja", "-f", str(rules), "-j", str(jobs)]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
            raise SystemExit(f"wheels: a build for {self.target.triple} failed: the compiler's words are above")


def engine_sources() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.cpp"))


def of_python(path: Path) -> bool:
    return path.parts[1] == "python"


def build_engines(target: Target, pythons: list[str], jobs: int) -> None:
    """Build an engine for each Python. All of them share most objects."""
    rules = Rules(target)
    torch = torch_headers()
    common = rules.common_objects()
    sources = [path for path in engine_sources() if of_python(path)]
    script = rules.folder / "exports"
    for version in pythons:
        include = headers.python(version, target.arch)
        flags = ["-isystem", str(torch), *(word for path in include for word in ("-isystem", str(path)))]
        own = rules.folder / version
        made = rules.objects(sources, own, flags, {torch: "torch", **dict.fromkeys(include, "python")})
        link = [*LINK, f"-Wl,--version-script={script}"]
        for name, strip in (("_engine.so", ["-s"]), ("_engine.debug", [])):
            rules.link(own / name, common + made, link + strip, needs=script)
    target.folder.mkdir(parents=True, exist_ok=True)
    (target.folder / "exports").write_text("{ global: PyInit__engine; local: *; };\n")
    rules.build(jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--arch", choices=("x86_64", "aarch64"), default=os.uname().machine)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    target = Target(arguments.arch)
    pythons = arguments.pythons or list(PYTHONS)
    os.chdir(ROOT)
    os.umask(0o022)
    os.environ.setdefault("SOURCE_DATE_EPOCH", packing.commit_time())
    build_engines(target, pythons, arguments.jobs)
    for version in pythons:
        wheel = packing.pack(target.folder / version / "_engine.so", version, target.platform, arguments.out)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
