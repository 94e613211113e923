"""The loaders' interfaces of vLLM and SGLang, recorded from their wheels, and stand-ins.

The packages are too large for the tests. Record the interfaces again, or those of other versions:

    pip download --no-deps -d wheels vllm==0.33.0
    python tests/loader_interfaces.py wheels/*.whl
"""

import ast
import dataclasses
import enum
import json
import sys
import types
import zipfile
from pathlib import Path

RECORD = Path(__file__).with_suffix(".json")
# Modules, and the functions and classes of each that an adapter uses or derives from.
WANTED = {
    "vllm": {
        "vllm.config": ["get_current_vllm_config_or_none"],
        "vllm.config.load": ["LoadConfig"],
        "vllm.config.speculative": ["SpeculativeConfig"],
        "vllm.distributed.parallel_state": ["get_tp_group", "model_parallel_is_initialized"],
        "vllm.model_executor.model_loader": ["register_model_loader", "get_model_loader"],
        "vllm.model_executor.model_loader.base_loader": ["BaseModelLoader"],
        "vllm.model_executor.model_loader.default_loader": ["DefaultModelLoader"],
        "vllm.model_executor.model_loader.ep_weight_filter": ["should_skip_weight"],
    },
    "sglang": {
        "sglang.srt.configs.load_config": ["LoadConfig", "LoadFormat"],
        "sglang.srt.distributed.parallel_state": ["get_tp_group", "model_parallel_is_initialized"],
        "sglang.srt.model_loader.loader": ["BaseModelLoader", "DefaultModelLoader", "get_model_loader"],
        "sglang.srt.model_loader.weight_utils": ["maybe_add_mtp_safetensors"],
        "sglang.srt.plugins.hook_registry": ["HookRegistry", "HookType"],
        "sglang.srt.runtime_context": ["get_model"],
        "sglang.srt.server_args": ["add_load_format_choices", "get_global_server_args"],
    },
}


# ---------------------------------------------------------------------------------------------------- recording


def recorded(wheel: Path) -> tuple[str, dict]:
    """Return "PACKAGE VERSION", and the interfaces by module and name."""
    package, version = wheel.name.split("-")[:2]
    found = {}
    with zipfile.ZipFile(wheel) as files:
        for module, names in WANTED[package].items():
            nodes = _nodes(files, module)
            if nodes:
                found[module] = {name: _about(_followed(files, nodes, name)) for name in names if name in nodes}
    return f"{package} {version}", found


def _nodes(files, module):
    """Return what a module defines and imports, by name."""
    path = module.replace(".", "/")
    (path,) = {f"{path}.py", f"{path}/__init__.py"} & set(files.namelist()) or {""}
    body = ast.parse(files.read(path)).body if path else []
    imported = {one.name: node for node in body if isinstance(node, ast.ImportFrom) for one in node.names}
    return imported | {_name_of(node): node for node in body}


def _followed(files, nodes, name):
    node = nodes[name]
    return _nodes(files, node.module)[name] if isinstance(node, ast.ImportFrom) else node


def _name_of(node):
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", None)


def _about(node):
    if isinstance(node, ast.Assign):  # as f = LIST.extend
        return "(items, /)"
    if isinstance(node, ast.FunctionDef):
        for one in ast.walk(node.args):
            if isinstance(one, ast.arg):
                one.annotation = None
        node.args.defaults = [ast.Constant(...) for _ in node.args.defaults]
        node.args.kw_defaults = [one and ast.Constant(...) for one in node.args.kw_defaults]
        returned = f" -> {ast.unparse(node.returns)!r}" if node.returns else ""
        kind = "".join(f"@{one} " for one in _decorators(node) if one in ("classmethod", "staticmethod"))
        return f"{kind}({ast.unparse(node.args)}){returned}"
    is_dataclass = any(one.startswith(("config", "dataclass", "dataclasses.")) for one in _decorators(node))
    about = {"bases": [ast.unparse(base) for base in node.bases], "dataclass": is_dataclass, "fields": {}, "of": {}}
    for one in node.body:
        if isinstance(one, ast.AnnAssign):
            about["fields"][one.target.id] = ast.unparse(one.value) if one.value else None
        elif isinstance(one, ast.Assign):
            about["fields"][_name_of(one)] = ast.unparse(one.value)
        elif isinstance(one, (ast.FunctionDef, ast.ClassDef)):
            about["of"][one.name] = _about(one)
    return about


def _decorators(node):
    return [ast.unparse(one) for one in node.decorator_list]


# ---------------------------------------------------------------------------------------------------- stand-ins


def stand_ins(version: str, behaviors: dict) -> dict[str, types.ModuleType]:
    """Return modules with the recorded interfaces.

    Args:
        version: as "vllm 0.33.0".
        behaviors: by "Class.method" or "function", what a call does. It gets the arguments by their
            recorded names, the `self` of a method among them. Calls of others are errors.
    """
    made: dict[str, types.ModuleType] = {}
    for module, interfaces in json.loads(RECORD.read_text())[version].items():
        for end in range(1, module.count(".") + 2):
            path = ".".join(module.split(".")[:end])
            if path not in made:
                made[path] = types.ModuleType(path)
                made[path].__path__ = []
                parent, _, name = path.rpartition(".")
                if parent:
                    setattr(made[parent], name, made[path])
        for name, about in interfaces.items():
            setattr(made[module], name, _made(name, about, made, behaviors))
    return made


def _made(name, about, modules, behaviors):
    if isinstance(about, str):
        return _function(name, about, behaviors)
    short = name.rpartition(".")[2]
    known = {one: made for module in modules.values() for one, made in vars(module).items() if isinstance(made, type)}
    bases = tuple(known[base] for base in about["bases"] if base in known)
    inner = {one: _made(f"{name}.{one}", its, modules, behaviors) for one, its in about["of"].items()}
    values = {one: _literal(value) for one, value in about["fields"].items()}
    if any("Enum" in base for base in about["bases"]):
        return enum.Enum(short, values, type=str)
    if not about["dataclass"]:
        return type(short, bases, values | inner)
    needed = [(one, object) for one, value in about["fields"].items() if value is None]
    others = [(one, object, dataclasses.field(default=values[one])) for one, _ in about["fields"].items()]
    return dataclasses.make_dataclass(short, [*needed, *others[len(needed) :]], namespace=inner)


def _literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return None


def _function(name, about, behaviors):
    def behave(arguments):
        if name not in behaviors:
            raise AssertionError(f"the stand-in of {name} was called")
        return behaviors[name](**arguments)

    kind, _, signature = about.rpartition("@")[2].partition(" ") if about.startswith("@") else ("", "", about)
    scope = {"behave": behave, "classmethod": classmethod, "staticmethod": staticmethod}
    exec(f"def made{signature}: return behave(dict(locals()))", scope)
    return scope[kind](scope["made"]) if kind else scope["made"]


if __name__ == "__main__":
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known.update(recorded(Path(path)) for path in sys.argv[1:])
    RECORD.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
