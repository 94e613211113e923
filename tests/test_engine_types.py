"""`gdsdata/_engine.pyi` matches the built extension: names, kinds, parameters, defaults."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import gdsdata
from gdsdata import _engine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
STUB = ast.parse((Path(gdsdata.__file__).parent / "_engine.pyi").read_text())


def parameters_of_stub(function: ast.FunctionDef) -> list[str]:
    """List names, "name=" with a default, "?" if positional, and keywords alone behind "*"."""
    arguments = function.args
    ordinary = [*arguments.posonlyargs, *arguments.args]
    plain = len(ordinary) - len(arguments.defaults)
    names = ["?" if one in arguments.posonlyargs and one.arg != "self" else one.arg for one in ordinary]
    names = [name + ("=" if i >= plain else "") for i, name in enumerate(names)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    by_keyword = [one.arg + ("=" if default is not None else "") for one, default in keywords]
    return names + (["*", *by_keyword] if by_keyword else [])


def parameters_of_signature(signature: str) -> list[str]:
    """List the same of pybind11's "call(self: Engine, path: str, depth: int = 0) -> None"."""
    inside, depth, parts = signature[signature.index("(") + 1 : signature.rindex(") ->")], 0, [""]
    inside = inside.replace("(anonymous namespace)", "")
    for sign in inside:
        depth += (sign in "[(") - (sign in ")]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    names = []
    for part in filter(None, map(str.strip, parts)):
        name = re.sub(r"^arg\d+$", "?", part.partition(":")[0])
        names.append(name + ("=" if " = " in part else ""))
    return names


def described_by_stub(body: list[ast.stmt]) -> dict[str, object]:
    """Map names to parameters (by overload), "property", or the content of a class."""
    found: dict[str, object] = {}
    for item in body:
        name = getattr(item, "name", None) or getattr(getattr(item, "target", None), "id", "_")
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(item, ast.ClassDef):
            found[name] = described_by_stub(item.body)
        elif isinstance(item, ast.FunctionDef):
            decorators = [one.id for one in item.decorator_list if isinstance(one, ast.Name)]
            if "property" in decorators:
                found[name] = "property"
            else:
                found.setdefault(name, []).append(parameters_of_stub(item))
        else:
            found[name] = "value"
    return found


def described_by_module(members: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, member in members.items():
        text = getattr(member, "__doc__", None) or ""
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, type):
            found[name] = described_by_module(vars(member))
        elif isinstance(member, property):
            found[name] = "property"
        elif not callable(member):
            found[name] = "value"
        else:
            signatures = re.findall(rf"^(?:\d+\. )?({name}\(.*\) -> .*)$", text, re.MULTILINE)
            signatures = [one for one in signatures if "*args" not in one]
            if signatures:  # a class that Python cannot make has none for __init__
                found[name] = [parameters_of_signature(one) for one in signatures]
    return found


# The rules that mypy does not apply, by module. Remove one when it is kept; add none.
LEFT_OUT = {"gdsdata.bench.*": {"disallow_untyped_defs", "disallow_untyped_calls"}}

OF_STUB, OF_MODULE = described_by_stub(STUB.body), described_by_module(vars(_engine))


def test_the_stub_names_what_the_module_has():
    assert sorted(OF_STUB) == sorted(OF_MODULE)


@pytest.mark.parametrize("name", sorted(OF_MODULE))
def test_the_stub_agrees_with_the_built_module(name):
    assert OF_STUB[name] == OF_MODULE[name]


def test_signatures_that_differ_are_seen():
    assert parameters_of_signature("f(self: E, a: tuple[int, int] = (1, 2), b: x::Mark) -> int") == ["self", "a=", "b"]
    changed = ast.parse("def f(self, a: int = 0, *, b: int) -> int: ...").body[0]
    assert parameters_of_stub(changed) == ["self", "a=", "*", "b"]


@pytest.mark.skipif(not PROJECT.exists(), reason="an installed package has no pyproject.toml")
def test_mypy_leaves_out_no_more_rules_than_before():
    overrides = tomllib.loads(PROJECT.read_text())["tool"]["mypy"]["overrides"]
    ours = [(module, {*one} - {"module"}) for one in overrides for module in one["module"] if "gdsdata" in module]
    assert ours and all(rules <= LEFT_OUT.get(module, set()) for module, rules in ours)


def test_the_package_says_that_it_is_typed():
    assert (Path(gdsdata.__file__).parent / "py.typed").exists()
