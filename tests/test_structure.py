"""The structure of the sources: includes, imports, linked libraries, and the package's content."""

import ast
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdsdata.torch_private import CHECKED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "gdsdata"

# --- csrc: includes go down this list ---------------------------------------------------------------------------------

ROOMS = ["python", "engine", "backend", "device", "base", "tuning.h"]


def cpp_files():
    files = sorted(path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".h"))
    assert files, f"no C++ sources under {CSRC}"
    return files


def includes(path, quotes):
    """Return the names that a file includes. ``quotes`` is '""' for ours, '<>' for others'."""
    return re.findall(rf"^\s*#\s*include\s*{quotes[0]}([^>\"]+){quotes[1]}", path.read_text(), re.MULTILINE)


def code_of(path):
    """Return the text without comments and quoted strings."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, " ", path.read_text(), flags=re.DOTALL)


def test_every_source_stands_in_a_room():
    strangers = [str(path.relative_to(CSRC)) for path in cpp_files() if path.relative_to(CSRC).parts[0] not in ROOMS]
    assert not strangers, f"csrc/ has the folders {ROOMS} only; these files are in none of them: {strangers}"


def test_includes_go_down_the_rooms_and_never_up():
    wrong = []
    for path in cpp_files():
        room = path.relative_to(CSRC).parts[0]
        for name in includes(path, '""'):
            if not (CSRC / name).is_file():
                wrong.append(f'{path.relative_to(ROOT)}: "{name}" is not a path below csrc/ (write "room/file.h")')
            elif ROOMS.index(Path(name).parts[0]) < ROOMS.index(room):
                wrong.append(f"{path.relative_to(ROOT)}: {room}/ may not include {name}")
    assert not wrong, "\n".join(wrong)


def test_only_the_python_room_includes_pybind11_or_python():
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in cpp_files()
        if path.relative_to(CSRC).parts[0] != "python"
        for name in includes(path, "<>") + includes(path, '""')
        if re.match(r"pybind11/|Python\.h", name)
    ]
    assert not wrong, wrong


def test_no_source_includes_torch():
    """DLPack's structures are an exception: a plain C header that torch ships."""
    names = [name for path in cpp_files() for name in includes(path, "<>") + includes(path, '""')]
    assert {name for name in names if re.match(r"(torch|ATen|c10)/", name)} <= {"ATen/dlpack.h"}


def test_only_cuda_api_names_cuda():
    """cuFile has a table of its own, backend/cufile_api. Its names belong to backend/cufile*."""
    wrong = []
    for path in cpp_files():
        place = path.relative_to(CSRC).as_posix()
        if place.startswith("device/cuda_api."):
            continue
        found = set(re.findall(r"\b(?:cu[A-Z]\w*|CU[a-z]\w*|CU_\w+|cuda[A-Z]\w*)", code_of(path)))
        found |= {name for name in includes(path, "<>") + includes(path, '""') if re.match(r"cu(da|file)\w*\.h$", name)}
        if place.startswith("backend/cufile"):
            found = {name for name in found if not re.match(r"(?i)cu_?file", name)}
        wrong += [f"csrc/{place}: {name}" for name in sorted(found)]
    assert not wrong, wrong


def test_no_wait_depends_on_the_systems_clock():
    """libc++ for an old glibc, in the wheels, waits until a time of that clock."""
    pattern = r"\bstd::(?:condition_variable(?:_any)?|\w*timed_mutex|\w*future|\w+_semaphore)\b|\bsystem_clock\b"
    wrong = [str(path.relative_to(CSRC)) for path in cpp_files() if re.search(pattern, code_of(path))]
    assert not wrong, f"use base/condition.h in {wrong}"


def test_no_source_asks_the_compilers_runtime_about_the_processor():
    """Zig's runtime, in the wheels, answers no to everything."""
    assert not [path for path in cpp_files() if re.search(r"__builtin_cpu|target_clones|\bifunc\b", code_of(path))]


def test_the_gather_kernel_was_compiled_from_its_source():
    source = (CSRC / "device" / "gather_kernel.cu").read_bytes()
    made = (CSRC / "device" / "gather_kernel.cpp").read_text()
    assert hashlib.sha256(source).hexdigest() in made, "run csrc/device/compile_gather.py"


# --- gdsdata: imports go by this table, from ARCHITECTURE -------------------------------------------------------------

# Keys are folders, nested ones too, and the modules beside them. A module belongs to the deepest
# key that contains it. It may import from there, and from the listed folders and modules with all
# they contain.
EVERYTHING = None
FOLDERS = {
    "__init__": EVERYTHING,
    "bench": EVERYTHING,
    "bench.cases": {"bench.data", "bench.harness", "bench.measure", "bench.peers", "bench.report", "", "io"},
    "bench.report": {"bench.harness", "bench.measure"},
    "bench.harness": {"bench.data", "bench.measure", "bench.peers.registry"},
    "bench.peers": EVERYTHING,
    "bench.data": {"bench.measure"},
    "bench.measure": set(),
    "integrations": EVERYTHING,
    "safetensors": {"checkpoint"},
    "doctor": {"command_output", "errors", "io", "lazy", "storage"},
    "checkpoint": {
        "collective",
        "distinct",
        "errors",
        "fork_safe",
        "formats.parsers",
        "io",
        "lazy",
        "observe",
        "progress_bars",
        "storage",
        "torch_private",
        "warn",
        "whole_numbers",
    },
    "collective": {"distinct", "errors", "io", "torch_private"},
    "data": {
        "collective",
        "decoders",
        "distinct",
        "errors",
        "formats",
        "io",
        "observe",
        "progress_bars",
        "storage",
        "torch_private",
        "user_cache",
        "version",
        "warn",
        "whole_numbers",
    },
    "data.batches": {
        "collective",
        "data.counts",
        "data.order",
        "decoders",
        "distinct",
        "errors",
        "fork_safe",
        "formats",
        "io",
        "storage",
    },
    "data.order": {"data.ranks", "distinct", "errors", "formats", "io", "storage", "whole_numbers"},
    "decoders": {"errors", "formats", "io"},
    "formats": {
        "distinct",
        "errors",
        "fork_safe",
        "io.engine",
        "lazy",
        "progress_bars",
        "storage",
        "user_cache",
        "values",
        "warn",
        "whole_numbers",
    },
    "formats.parsers": {"errors", "io.engine"},
    "top": {"command_output", "observe"},
    "cache": {"command_output", "formats.listing", "io.remote_access", "progress_bars", "storage"},
    "storage": {
        "errors",
        "fork_safe",
        "io.engine",
        "io.options",
        "io.remote_access",
        "lazy",
        "observe.counted",
        "progress_bars",
    },
    "observe": {"errors", "io", "torch_private", "version", "warn"},
    "observe.counted": set(),
    "io": {
        "_engine",
        "errors",
        "fork_safe",
        "formats.index",
        "formats.sample",
        "torch_private",
        "user_cache",
        "values",
        "warn",
        "whole_numbers",
    },
    "command_output": set(),
    "progress_bars": {"drawn_bars"},
    "torch_private": {"warn"},
    "lazy": set(),
    "version": set(),
    "distinct": set(),
    "drawn_bars": set(),
    "errors": set(),
    "fork_safe": {"torch_private"},
    "user_cache": set(),
    "warn": set(),
    "values": set(),
    "whole_numbers": set(),
}


def module_name(path):
    """Return the name below gdsdata, such as "data.order.lanes". __init__.py has its folder's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def is_in(module, room):
    return module == room or module.startswith(f"{room}.")


def room_of(module):
    rooms = [room for room in FOLDERS if is_in(module, room)]
    assert rooms, f"say in FOLDERS what gdsdata/{module.replace('.', '/')} may import"
    return max(rooms, key=len)


@functools.cache
def imported_modules(path):
    """Return the gdsdata modules that a file imports, also for types alone ("": the package)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("gdsdata.") in {*MODULES, "_engine"} else node.module for name in inner]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # for importlib.import_module
            names = [node.value] if re.fullmatch(r"gdsdata\.[\w.]+", node.value) else []
        for name in names:
            first, _, inner = name.partition(".")
            if first == "gdsdata":
                found.append(inner if inner == "_engine" or inner in MODULES else "")
    return found


def test_every_room_of_the_table_is_there():
    assert {room for room in FOLDERS if not any(is_in(module, room) for module in MODULES)} == set()


def test_imports_follow_the_table():
    wrong = []
    for module, path in sorted(MODULES.items()):
        room = room_of(module)
        allowed = FOLDERS[room]
        for target in sorted(set(imported_modules(path))):
            if allowed is not EVERYTHING and not any(is_in(target, one) for one in {*allowed, room}):
                wrong.append(f"{path.relative_to(ROOT)}: {room} may not import {target or 'the package itself'}")
    assert not wrong, "\n".join(wrong)


def is_lazy(path):
    """Return whether a package's file imports its names when they are first used."""
    functions = {target.id for node in ast.parse(path.read_text()).body for target in targets_of(node)}
    return path.name == "__init__.py" and "__getattr__" in functions


def targets_of(node):
    """Return the functions and variables that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef):
        return [ast.Name(node.name)]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [one for target in targets for one in getattr(target, "elts", [target]) if isinstance(one, ast.Name)]


def circles_of(graph):
    """Return the strongly connected components of more than one module."""

    def reached_from(module):
        found, waiting = set(), [module]
        while waiting:
            for target in graph[waiting.pop()] - found:
                found.add(target)
                waiting.append(target)
        return found

    reached = {module: reached_from(module) for module in graph}
    circles = {frozenset(one for one in reached[module] if module in reached[one]) for module in graph}
    return sorted(sorted(circle) for circle in circles if len(circle) > 1)


def test_no_modules_import_each_other_in_a_circle():
    """Imports for types alone and in functions count too.

    A lazy package's __init__.py is left out, because it imports nothing by itself.
    """
    graph = {
        module: set() if is_lazy(path) else set(imported_modules(path)) & MODULES.keys() - {module}
        for module, path in MODULES.items()
    }
    assert [module for module, path in sorted(MODULES.items()) if is_lazy(path)] == [
        "__init__",
        "checkpoint",
        "doctor",
        "formats",
    ]
    assert circles_of(graph) == []


@pytest.mark.parametrize(
    ("imports", "circles"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_the_search_for_circles_finds_them(imports, circles):
    assert circles_of(imports) == circles


def imports_from_the_package(path):
    """Yield (module, name) of all that a file imports from gdsdata, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] == "gdsdata":
            yield from ((node.module, one.name) for one in node.names)


def has_name(module, name):
    try:
        there = hasattr(importlib.import_module(module), name)
        return there or importlib.util.find_spec(f"{module}.{name}") is not None
    except ImportError as error:
        return not str(error.name).startswith("gdsdata")  # an adapter's framework that is not installed


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_all_that_scripts_import_from_the_package_exists(folder):
    found = {(path, *one) for path in (ROOT / folder).rglob("*.py") for one in imports_from_the_package(path)}
    assert found
    lost = [f"{path.relative_to(ROOT)}: {module}.{name}" for path, module, name in found if not has_name(module, name)]
    assert not lost


MOST_LINES = 450
MOST_LINES_OF_DATASET = 350  # the first class that a user meets
LONGER_FILES = {"csrc/device/gather_kernel.cpp"}  # made by a compiler


def test_no_attribute_is_computed_under_the_lock_of_functools():
    # In Python 3.10 and 3.11 a forked child waits forever for it, if another thread held it.
    users = [path for path in PACKAGE.rglob("*.py") if re.search(r"functools.*cached_property", path.read_text())]
    others = [path for path in users if path.name != "fork_safe.py" and PACKAGE / "bench" not in path.parents]
    assert not others, "use gdsdata.fork_safe.cached_property"


def test_no_file_is_longer_than_a_reader_takes_in():
    files = [path for folder in (PACKAGE, CSRC) for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files}
    too_long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert set(too_long) == LONGER_FILES, f"split these: a file has at most {MOST_LINES} lines: {too_long}"
    assert lines["gdsdata/data/dataset.py"] <= MOST_LINES_OF_DATASET


def test_adapters_of_frameworks_are_short():
    lines = {path.name: path.read_text().count("\n") for path in (PACKAGE / "integrations").glob("*.py")}
    assert {name: count for name, count in lines.items() if count >= 200} == {}


def test_only_engine_py_imports_the_extension():
    importers = [path for path in PACKAGE.rglob("*.py") if "_engine" in imported_modules(path)]
    assert importers == [PACKAGE / "io" / "engine.py"]


def test_warnings_come_by_the_function_that_finds_the_callers_line():
    others = [path for path in PACKAGE.rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert others == [PACKAGE / "warn.py"], "use gdsdata.warn.warn"


def test_distinct_numbers_are_found_without_the_import_of_masked_arrays():
    lines = [line for path in PACKAGE.rglob("*.py") for line in path.read_text().splitlines() if "np.unique(" in line]
    assert all("return_" in line for line in lines), "use gdsdata.distinct.distinct"


# --- private parts of torch -------------------------------------------------------------------------------------------

# Names of Python's standard library.
PYTHONS_OWN = {
    "_asdict",
    "_at_fork_reinit",
    "_exit",
    "_fields",
    "_getframe",
    "_make",
    "_register_atexit",
    "_replace",
    "_state",
}


def own_names(tree):
    """Yield the names that a file defines, attributes and slots among them."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] == ["__slots__"]:
            yield from ast.literal_eval(node.value)


def names_of_others(node):
    """Return the names that code takes from other files or libraries, in strings too."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom) and not node.module.startswith("gdsdata"):
        return [*node.module.split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in alias.name.split(".")]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
        return [one.value for one in node.args[1:2] if isinstance(one, ast.Constant)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch\.[\w.]+", node.value):
        return node.value.split(".")
    return []


def private_parts_of_others(trees):
    own = {name for tree in trees.values() for name in own_names(tree)} | {"_engine"} | PYTHONS_OWN
    for module, tree in trees.items():
        for node in ast.walk(tree):
            for name in names_of_others(node):
                if re.fullmatch(r"_[A-Za-z]\w*", name) and name not in own:
                    yield f"{module}:{node.lineno}: {name}"


def test_only_torch_private_names_private_parts_of_torch():
    trees = {module: ast.parse(path.read_text()) for module, path in MODULES.items() if not is_in(module, "bench")}
    torch_private = trees.pop("torch_private")
    assert list(private_parts_of_others({"torch_private": torch_private}))
    assert list(private_parts_of_others(trees)) == []


@pytest.mark.parametrize(
    "code",
    [
        "torch._utils.f()",
        "from torch._utils import f",
        "from torch import _C",
        "import torch._C",
        "x = 'torch._utils'",
        "getattr(torch, '_utils')",
    ],
)
def test_the_check_for_private_parts_finds_each_way_to_name_one(code):
    assert len(list(private_parts_of_others({"code": ast.parse(code)}))) == 1


def test_torch_is_checked_in_the_versions_that_the_makefile_and_the_package_name():
    oldest, newest = (".".join(map(str, version)) for version in CHECKED)
    assert f"tested with torch {oldest} and with torch {newest}" in (ROOT / "Makefile").read_text()
    assert f'dependencies = ["torch>={oldest}",' in (ROOT / "pyproject.toml").read_text()


# --- the built extension ----------------------------------------------------------------------------------------------

FOREIGN = re.compile(r"\b(torch|c10|at|caffe2)::|THP|cuda|\bcu[A-Z]|\bnv[A-Z]")


def undefined_symbols(library):
    """Return the library's undefined symbols, demangled."""
    listing = subprocess.run(["nm", "-DC", "--undefined-only", library], capture_output=True, text=True, check=True)
    return [re.sub(r"^\s*\w\s+", "", line) for line in listing.stdout.splitlines()]


def needed_libraries(library):
    listing = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", listing)


def built_extension():
    spec = importlib.util.find_spec("gdsdata._engine")
    assert spec is not None, "gdsdata._engine is not built: make build"
    return spec.origin


def test_extension_expects_no_torch_and_no_cuda_symbol():
    symbols = undefined_symbols(built_extension())
    assert any(name.startswith("PyObject_") for name in symbols), "nm shows not even Python's symbols"
    assert not [name for name in symbols if FOREIGN.search(name)]


def test_the_search_for_torch_symbols_finds_them_where_they_are():
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    assert any(FOREIGN.search(name) for name in undefined_symbols(torch_folder / "lib" / "libshm.so"))


def test_extension_needs_only_the_c_and_cpp_libraries():
    """liburing is linked statically if possible. Without liburing.a, the shared one is linked."""
    allowed = r"(libstdc\+\+|libgcc_s|libc|libm|libpthread|libdl|librt|ld-linux[-\w]*|liburing)\.so"
    needed = needed_libraries(built_extension())
    assert "libc.so.6" in needed
    assert not [name for name in needed if not re.match(allowed, name)]


def test_extension_imports_without_torch_and_without_a_driver():
    """The file alone is imported in a new process, which then has neither torch nor CUDA loaded."""
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("gdsdata._engine", {str(built_extension())!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
maps = open("/proc/self/maps").read()
loaded = [name for name in ("libtorch", "libc10", "libcuda", "libcudart", "libcufile") if name in maps]
print(loaded, "torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] False"


# --- the package ------------------------------------------------------------------------------------------------------


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_in_pyproject_is_the_package_version():
    import gdsdata

    assert pyproject()["project"]["version"] == gdsdata.__version__


def test_pyproject_names_every_package():
    found = {"gdsdata.configs"} | {
        ".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")
    }
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == found


def test_the_package_is_found_from_any_folder(tmp_path):
    """This holds for an editable installation too, which has an import hook of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import gdsdata; from gdsdata.bench import settings; gdsdata.GDSDataset, settings.configs_folder()"
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# --- building ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def build_extension():
    spec = importlib.util.spec_from_file_location("build_extension", CSRC / "build_extension.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("version", ["2.9.0+cu128", "2.10.1", "1.13.0a0+git12"])
def test_headers_of_an_old_torch_are_an_error_that_names_another_way(build_extension, version):
    with pytest.raises(build_extension.SetupError, match=f"torch {re.escape(version)} are too old.*a wheel$"):
        build_extension.check_headers(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.15.0+cu132", "3.0.0.dev20270101", torch.__version__])
def test_headers_of_a_newer_torch_are_built_with(build_extension, version):
    build_extension.check_headers(version)


def test_the_oldest_torch_to_build_with_is_the_one_that_the_package_requires(build_extension):
    assert (
        f'"torch>={".".join(map(str, build_extension.OLDEST_TORCH))}", "ninja"' in (ROOT / "pyproject.toml").read_text()
    )


def make_compiler(folder, *, header, libraries=()):
    """Make a program that answers like a compiler with these libraries, and the header or not."""
    for library in libraries:
        (folder / library).touch()
    script = folder / "fake-cxx"
    script.write_text(
        f"""#!/bin/sh
case "$1" in
  -print-file-name=*) name=${{1#*=}}; test -e {folder}/$name && echo {folder}/$name || echo $name ;;
  *) cat >/dev/null; exit {0 if header else 1} ;;
esac
"""
    )
    script.chmod(0o755)
    return str(script)


def assert_names_the_remedies(message):
    for remedy in ("apt-get install liburing-dev", "dnf install liburing-devel", "GDSDATA_WITHOUT_LIBURING=1"):
        assert remedy in message
    assert "\n" not in message


def test_a_missing_liburing_header_is_an_error_with_its_remedies(build_extension, tmp_path):
    compiler = make_compiler(tmp_path, header=False)
    with pytest.raises(build_extension.SetupError, match="there is no liburing.h") as raised:
        build_extension.liburing_flags({}, compiler)
    assert_names_the_remedies(str(raised.value))


def test_a_missing_liburing_library_is_an_error_with_its_remedies(build_extension, tmp_path):
    compiler = make_compiler(tmp_path, header=True)
    with pytest.raises(build_extension.SetupError, match="neither liburing.a nor liburing.so") as raised:
        build_extension.liburing_flags({}, compiler)
    assert_names_the_remedies(str(raised.value))


def test_a_liburing_prefix_without_a_library_is_an_error_with_its_remedies(build_extension, tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "liburing.h").touch()
    with pytest.raises(build_extension.SetupError, match=f"LIBURING_PREFIX={tmp_path} lacks") as raised:
        build_extension.liburing_flags({"LIBURING_PREFIX": str(tmp_path)}, "false")
    assert_names_the_remedies(str(raised.value))


def test_liburing_prefix_is_used_before_the_system(build_extension, tmp_path):
    for file in ("include/liburing.h", "lib/liburing.a"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    flags = build_extension.liburing_flags({"LIBURING_PREFIX": str(tmp_path)}, "false")
    assert flags.compile == ["-isystem", f"{tmp_path}/include"]
    assert flags.link == [f"{tmp_path}/lib/liburing.a"]


def test_static_liburing_is_preferred_to_the_shared_one(build_extension, tmp_path):
    compiler = make_compiler(tmp_path, header=True, libraries=["liburing.a", "liburing.so"])
    assert build_extension.liburing_flags({}, compiler).link == [f"{tmp_path}/liburing.a"]
    (tmp_path / "liburing.a").unlink()
    assert build_extension.liburing_flags({}, compiler).link == ["-luring"]


def test_without_liburing_asks_for_no_library(build_extension):
    flags = build_extension.liburing_flags({"GDSDATA_WITHOUT_LIBURING": "1"}, "false")
    assert (flags.compile, flags.link) == (["-DGDSDATA_WITHOUT_LIBURING"], [])


@pytest.mark.slow
@pytest.mark.timeout(550)
def test_engine_builds_and_imports_without_liburing(tmp_path):
    """LIBURING_PREFIX names an empty folder, so that the machine's liburing is not found."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in ("csrc", "gdsdata", "configs", "licenses"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):  # the metadata names the others
        shutil.copy(ROOT / name, tmp_path)
    environment = {**os.environ, "LIBURING_PREFIX": str(tmp_path / "none"), "PYTHONPATH": str(tmp_path)}
    build = [sys.executable, "-c", "from setuptools import setup; setup()", "build_ext", "--inplace"]

    refused = subprocess.run(build, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert refused.returncode != 0
    assert_names_the_remedies(refused.stderr.strip().splitlines()[-1])

    environment["GDSDATA_WITHOUT_LIBURING"] = "1"
    built = subprocess.run(build, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    program = "import gdsdata.io.engine, gdsdata._engine; print(gdsdata._engine.__file__)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    library = ran.stdout.strip()
    assert library.startswith(str(tmp_path))
    assert b"built without liburing" in Path(library).read_bytes()


# --- conftest.py ------------------------------------------------------------------------------------------------------


def run_one_test(folder, program, **environment):
    """Run a file of tests beside a copy of conftest.py, and return what pytest said."""
    for name in ("conftest.py", "browser.py"):
        shutil.copy(ROOT / "tests" / name, folder)
    shutil.copytree(ROOT / "tests" / "servers", folder / "servers")
    (folder / "test_it.py").write_text(program)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True).stdout


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_gpu_tests_without_a_gpu_skip_unless_a_gpu_is_required(tmp_path, required, outcome):
    program = "import pytest\n@pytest.mark.gpu\ndef test_it(): pass\n"
    said = run_one_test(tmp_path, program, GDSDATA_REQUIRE_GPU=required, CUDA_VISIBLE_DEVICES="")
    assert outcome in said.splitlines()[-1]
    if required == "1":
        assert "GDSDATA_REQUIRE_GPU is set, but torch" in said


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
@pytest.mark.parametrize("lack", ["Chromium", "playwright"])
def test_tests_of_pages_without_a_browser_skip_unless_it_is_required(tmp_path, lack, required, outcome):
    stand_in = tmp_path / "playwright"
    stand_in.mkdir()
    (stand_in / "__init__.py").write_text("" if lack == "Chromium" else "raise ImportError")
    (stand_in / "sync_api.py").touch()
    chosen = {"GDSDATA_REQUIRE_BROWSER": required, "GDSDATA_CHROMIUM": str(tmp_path / "none")}
    said = run_one_test(tmp_path, "def test_it(browser): pass\n", PYTHONPATH=str(tmp_path), **chosen)
    assert outcome in said.splitlines()[-1] and f"there is no {lack}" in said
    assert ("GDSDATA_REQUIRE_BROWSER is set, but" in said) == (required == "1")


def test_make_test_site_runs_every_test_with_a_browser_and_requires_one():
    command = re.search(r"^test-site:.*\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    tests = [path for path in (ROOT / "tests").glob("test_*.py") if "\nfrom browser import" in path.read_text()]
    assert command.startswith("GDSDATA_REQUIRE_BROWSER=1 ")
    assert sorted(re.findall(r"tests/(\w+\.py)", command)) == sorted(path.name for path in tests) != []
