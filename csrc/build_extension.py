"""Build the extension `gdsdata._engine` from every .cpp under csrc/.

Liburing is linked in, and libtorch is not. pyproject.toml names BuildEngine as its build_ext
command, which reads these variables of the environment:

- LIBURING_PREFIX: a folder with include/liburing.h and lib/liburing.a, instead of the system's.
- GDSDATA_WITHOUT_LIBURING: 1 builds an engine without the io_uring backend.
- CXX, MAX_JOBS: the compiler, and how many of them run at the same time.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from setuptools.errors import SetupError

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, get_cxx_compiler
except ImportError as error:
    raise SystemExit(
        f"gdsdata is built with the help of torch, which does not import here ({error}): "
        "pip install 'torch>=2.11' first, then pip install --no-build-isolation ."
    ) from None

OLDEST_TORCH = (2, 11)  # the first one that was tested to have DLPack's exchange in its headers


def check_headers(version: str) -> None:
    """Refuse to build with the headers of a torch that is too old.

    The extension serves torch from 2.9 on, because nothing of torch is linked.

    Raises:
        SetupError: the version is older than `OLDEST_TORCH`.
    """
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        raise SetupError(
            f"the headers of torch {version} are too old to build with: run pip install . without "
            "--no-build-isolation, which takes a newer torch for the build alone, or install a wheel"
        )


MISSING_LIBURING = (
    "{what}: install it (apt-get install liburing-dev, or dnf install liburing-devel), name a folder that has "
    "include/liburing.h and lib/liburing.a by LIBURING_PREFIX, or build without io_uring by GDSDATA_WITHOUT_LIBURING=1"
)


@dataclass
class Flags:
    """One library's arguments for the compiler and the linker."""

    compile: list[str] = field(default_factory=list)
    link: list[str] = field(default_factory=list)


def liburing_flags(environment: dict[str, str] | os._Environ[str], compiler: str) -> Flags:
    """Return liburing's flags: for the static library if there is one, else for the dynamic one.

    Raises:
        SetupError: neither is installed.
    """
    if environment.get("GDSDATA_WITHOUT_LIBURING", "0") not in ("", "0"):
        return Flags(["-DGDSDATA_WITHOUT_LIBURING"])
    if prefix := environment.get("LIBURING_PREFIX"):
        include = Path(prefix).resolve() / "include"
        libraries = [Path(prefix).resolve() / folder / "liburing.a" for folder in ("lib", "lib64")]
        library = next((library for library in libraries if library.exists()), None)
        if library is None or not (include / "liburing.h").exists():
            what = f"LIBURING_PREFIX={prefix} lacks include/liburing.h or lib/liburing.a"
            raise SetupError(MISSING_LIBURING.format(what=what))
        return Flags(["-isystem", str(include)], [str(library)])
    if not has_header(compiler, "liburing.h"):
        raise SetupError(MISSING_LIBURING.format(what="gdsdata needs liburing to build, and there is no liburing.h"))
    # Static first: the wheel then needs no liburing where it is installed.
    for name, flag in (("liburing.a", None), ("liburing.so", "-luring")):
        if found := library_path(compiler, name):
            return Flags([], [flag or found])
    raise SetupError(MISSING_LIBURING.format(what="liburing.h is there, but neither liburing.a nor liburing.so"))


def has_header(compiler: str, header: str) -> bool:
    command = [*compiler.split(), "-x", "c++", "-E", "-"]
    return subprocess.run(command, input=f"#include <{header}>\n", capture_output=True, text=True).returncode == 0


def library_path(compiler: str, name: str) -> str | None:
    """Return the path at which the compiler finds the library, or None.

    The compiler knows the distribution's folders (lib64, x86_64-linux-gnu).
    """
    command = [*compiler.split(), f"-print-file-name={name}"]
    answer = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    for path in (Path(answer), Path("/usr/local/lib") / name, Path("/usr/local/lib64") / name):
        if path.is_absolute() and path.exists():  # a compiler that finds nothing answers with the bare name
            return str(path)
    return None


class BuildEngine(BuildExtension):
    """torch's build_ext for this extension. Its ninja compiles only what has changed."""

    def finalize_options(self):
        super().finalize_options()
        csrc = Path("csrc")
        for extension in self.extensions or []:
            extension.sources = sorted(path.as_posix() for path in csrc.rglob("*.cpp"))
            extension.include_dirs = [str(csrc.resolve())]  # absolute: ninja runs in the build folder
            # The sdist must contain these besides the sources.
            extension.depends = sorted(path.as_posix() for path in csrc.rglob("*.h")) + [
                (csrc / "build_extension.py").as_posix()
            ]

    def run(self):
        if self.inplace or self.editable_mode:
            # pip's editable build deletes its own folder. In this one the objects stay, and
            # `make build` and `pip install -e .` share them.
            self.build_temp = "build/engine"
        super().run()

    def build_extensions(self):
        check_headers(torch.__version__)
        liburing = liburing_flags(os.environ, get_cxx_compiler())
        pybind11 = Path(torch.__file__).parent / "include"
        for extension in self.extensions:
            # -isystem: no warnings about pybind11's code.
            extension.extra_compile_args += ["-isystem", str(pybind11), *liburing.compile]
            extension.extra_link_args += liburing.link
        super().build_extensions()
