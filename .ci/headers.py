"""Find Python's headers and liburing, or fetch them.

Compiling an extension needs the headers of a Python alone, and linking needs nothing of it. For
Pythons that this machine lacks, Debian's packages of headers are unpacked below build/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "build" / "wheels" / "packages"
SUITES = ("bookworm", "trixie", "forky", "sid")  # the first one that has the package serves
DEBIAN_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
INCLUDE = "import sysconfig; print(sysconfig.get_path('include'), sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"


def python(version: str, arch: str) -> list[Path]:
    """Return the folders to include from for this version of Python, as "3.12"."""
    if arch == os.uname().machine:
        for interpreter in interpreters(version):
            ran = subprocess.run([interpreter, "-c", INCLUDE], capture_output=True, text=True)
            include, _, no_gil = ran.stdout.strip().rpartition(" ")
            if ran.returncode == 0 and no_gil == "0" and (Path(include) / "Python.h").exists():
                return [Path(include)]
    root = debian_package(f"libpython{version}-dev", arch)
    return [root / "usr/include", root / f"usr/include/python{version}"]


def interpreters(version: str) -> list[str]:
    """Return the interpreters of a version: on the path, and of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}")))]
    return [path for path in found if path]


def liburing(arch: str) -> Path:
    """Return a folder with include/liburing.h and lib/liburing.a.

    It is LIBURING_PREFIX, or a copy of what is installed here or of Debian's package. The copy has
    no header of glibc: the compiler has those of the version that it compiles for.
    """
    if prefix := os.environ.get("LIBURING_PREFIX"):
        return Path(prefix).resolve()
    root = Path("/")
    if arch != os.uname().machine or not list(root.glob(f"usr/lib*/{arch}-linux-gnu/liburing.a")):
        root = debian_package("liburing-dev", arch)
    copy = PACKAGES / arch / "liburing"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root / "usr/include/liburing", copy / "include" / "liburing")
    shutil.copy(root / "usr/include/liburing.h", copy / "include")
    (copy / "lib").mkdir()
    shutil.copy(next(root.glob(f"usr/lib*/{arch}-linux-gnu/liburing.a")), copy / "lib")
    return copy


def debian_package(name: str, arch: str) -> Path:
    """Fetch a package and return the folder that it is unpacked in. The package lists are our own.

    Raises:
        SystemExit: no suite has it, or there is no apt-get here.
    """
    place = PACKAGES / arch / name
    if place.exists():
        return place
    print(f"wheels: fetching {name} for {arch} from Debian", flush=True)
    for suite in SUITES:
        apt = apt_get(suite, arch)
        got = subprocess.run([*apt, "-q", "download", name], cwd=apt_folder(suite, arch), capture_output=True)
        if got.returncode == 0:
            [package] = apt_folder(suite, arch).glob(f"{name}_*.deb")
            unpacked = place.with_name(f"{name}.part")
            shutil.rmtree(unpacked, ignore_errors=True)
            unpacked.mkdir(parents=True)
            subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
            unpacked.rename(place)
            return place
    raise SystemExit(
        f"wheels: no {name} for {arch}: install that Python with its headers (pyenv, uv python install, or Debian's "
        f"python3.x-dev) so that `python3.x` is on the path, or for liburing set LIBURING_PREFIX"
    )


def apt_folder(suite: str, arch: str) -> Path:
    return PACKAGES / "apt" / f"{suite}-{arch}"


def apt_get(suite: str, arch: str) -> list[str]:
    """Return an apt-get with lists of one suite alone, which this fetches the first time."""
    folder = apt_folder(suite, arch)
    settings = {
        "APT::Architecture": DEBIAN_ARCH[arch],
        "APT::Architectures": DEBIAN_ARCH[arch],
        "APT::Sandbox::User": "root",
        "Dir::Cache": folder,
        "Dir::State": folder,
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
    }
    command = ["apt-get", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    if not (folder / "ready").exists():
        for part in ("lists/partial", "archives/partial"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
        (folder / "sources.list").write_text(f"deb {signed} {debian_mirror()} {suite} main\n")
        if subprocess.run([*command, "-q", "update"], capture_output=True).returncode == 0:
            (folder / "ready").touch()
    return command


def debian_mirror() -> str:
    """Return the URL of the mirror that this machine uses."""
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"^\S+/debian/?$", listing, re.MULTILINE)
    if found is None:
        raise SystemExit("wheels: this machine has no Debian mirror configured: install the Pythons that are missing")
    return found.group()
