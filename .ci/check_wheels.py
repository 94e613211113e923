"""Check wheels: `.ci/check_wheels.py dist/*.whl`. It fails at the first wheel that is wrong.

Checked are the glibc that auditwheel finds to be enough, the libraries and the symbols of the
extension, the size, the members, and what PyPI demands of the metadata (twine).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 5_000_000
LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
MEMBERS = ("gdsdata/py.typed", "gdsdata/_engine.pyi", "gdsdata/configs/config.yaml", "gdsdata/doctor/__main__.py")
NOTICES = ("LICENSE", "liburing.txt", "pybind11.txt")
# Zig has slower ones. On some machines a load of two ranks takes a fifth less time with these.
OF_LIBC = {"memcpy", "memmove", "memset", "memcmp", "strlen"}


def names_of_libraries(elf: ELFFile) -> set[str]:
    """Return the imported symbols that a library has to have, as their version says."""
    symbols, versions = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
    numbers = [versions.get_symbol(i)["ndx"] for i in range(versions.num_symbols())]
    return {one.name for one, number in zip(symbols.iter_symbols(), numbers, strict=True) if isinstance(number, int)}


def problems_of_engine(data: bytes) -> Iterator[str]:
    elf = ELFFile(io.BytesIO(data))
    needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    if others := needed - LIBRARIES - LOADERS:
        yield f"the engine needs libraries that are not everywhere: {sorted(others)}"
    symbols = [one for one in elf.get_section_by_name(".dynsym").iter_symbols() if one.name]
    exported = {one.name for one in symbols if one["st_shndx"] != "SHN_UNDEF"}
    if exported != {"PyInit__engine"}:
        yield f"the engine exports {sorted(exported)}, and should export PyInit__engine alone"
    imported = {one.name for one in symbols} - exported
    if own := OF_LIBC - imported:
        yield f"the engine has functions of its own in the place of the C library's: {sorted(own)}"
    if unknown := {name for name in imported - names_of_libraries(elf) if not re.match("_?Py", name)}:
        yield f"no library has functions that the engine calls: {sorted(unknown)}"
    if [one.name for one in elf.iter_sections() if one.name.startswith(".debug")]:
        yield "the engine has debug symbols"
    if str(ROOT).encode() in data:
        yield f"the engine names the folder it was built in, {ROOT}"


def problems(path: Path) -> Iterator[str]:
    if path.stat().st_size > MOST_BYTES:
        yield f"{path.stat().st_size} bytes are more than {MOST_BYTES}"
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [engine] = [name for name in names if name.endswith(".so")]
        yield from problems_of_engine(wheel.read(engine))
        if b"built without liburing" in wheel.read(engine):
            yield "the engine has no liburing"
    notices = [name.rpartition("/")[2] for name in names if "/licenses/" in name]
    lacking = [name for name in MEMBERS if name not in names] + [name for name in NOTICES if name not in notices]
    if lacking:
        yield f"members are lacking: {lacking}"
    if strangers := [name for name in names if not re.match(r"gdsdata(/|-[\d.]+\w*\.dist-info/)", name)]:
        yield f"members are outside of the package: {strangers}"
    yield from problems_for_auditwheel(path)


def problems_for_auditwheel(path: Path) -> Iterator[str]:
    ran = subprocess.run([sys.executable, "-m", "auditwheel", "show", path], capture_output=True, text=True)
    if ran.returncode != 0:
        yield f"auditwheel: {ran.stderr.strip()}"
        return
    named = re.search(r"manylinux_(\d+)_(\d+)_\w+", path.name)
    found = re.search(r"platform\s+tag:\s+\"(manylinux_(\d+)_(\d+)_\w+)\"", ran.stdout)
    if found is None:
        yield f"auditwheel finds no manylinux tag: {ran.stdout}"
    elif [int(part) for part in found.groups()[1:]] > [int(part) for part in named.groups()]:
        yield f"auditwheel finds {found[1]}"


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths:
        raise SystemExit("check_wheels: no wheel is named: run make wheels first")
    for path in paths:
        if found := list(problems(path)):
            raise SystemExit("\n".join(f"{path.name}: {problem}" for problem in found))
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, sound")
    twine = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *paths])
    raise SystemExit(twine.returncode)


if __name__ == "__main__":
    main()
