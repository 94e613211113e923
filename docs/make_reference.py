"""Write docs/reference/*.md, one page for each public module, from the docstrings.

python docs/make_reference.py [FOLDER]    # FOLDER: docs/reference

It reads the sources and imports nothing of them, so no framework has to be there. The exit status
is 1 if a public name has no docstring, or a public method or property of one. Methods of classes
that inherit from torch's may be torch's, whose documentation holds for them.
"""

import logging
import re
import sys
from pathlib import Path

import griffe
from griffe2md import render_object_docs

DOCS = Path(__file__).resolve().parent
# Public modules (docs/policies.md). `__all__` has their names, except those of decoders and errors.
FRAMEWORKS = (
    "accelerate", "composer", "dali", "deepspeed", "hf_trainer", "lightning", "lightning_async", "megatron",
    "megatron_data", "sglang", "torchtitan", "torchtitan_data", "transformers", "vllm",
)  # fmt: skip
MODULES = (
    "gdsdata",
    "gdsdata.formats",
    "gdsdata.decoders",
    "gdsdata.safetensors",
    "gdsdata.errors",
    "gdsdata.observe.live",
    *(f"gdsdata.integrations.{framework}" for framework in FRAMEWORKS),
)
CONFIG = {
    "heading_level": 2,
    "members_order": "source",
    "show_if_no_docstring": False,
    "show_root_full_path": False,
    "show_root_heading": True,
}
LINK = re.compile(r"\[([^\[\]]+)\]\(#([^()]+)\)")
TYPE = re.compile(r"<code>(.*?)</code>")
SIGNATURE = re.compile(r"^(```python\n\w+\()(.{78,})(\)\n```)$", re.MULTILINE)


def public_names(module: griffe.Module) -> list[str]:
    """Return the public names of a module that are not modules, in its order."""
    here = [name for name, one in module.members.items() if not one.is_alias and one.is_public]
    names = module.exports or [name for name in here if not module[name].is_attribute]
    return [str(name) for name in names if not module[str(name)].is_module]


def target_of(one: griffe.Object | griffe.Alias) -> griffe.Object:
    return one.final_target if isinstance(one, griffe.Alias) else one


def undocumented(module: griffe.Module) -> list[str]:
    """Return the public names, and their methods and properties, that have no docstring."""
    lacking = []
    for name in public_names(module):
        one = target_of(module[name])
        inherits = one.is_class and any(getattr(base, "canonical_path", "").startswith("torch.") for base in one.bases)
        members = () if inherits else filter(is_public_member, one.members.values())
        lacking += [target.path for target in (one, *members) if not target.docstring]
    return lacking


def is_public_member(member: griffe.Object | griffe.Alias) -> bool:
    """Return whether a member of a class is a public method or property."""
    is_property = member.is_attribute and "property" in member.labels
    return (member.is_function or is_property) and member.is_public and not member.name.startswith("_")


def page_of(module: griffe.Module, places: dict[str, str]) -> str:
    """Return a module's page: its docstring, then each public name.

    Add to `places` where each documented object is: a page and an anchor, by the object's path.
    """
    parts = [f"# {module.path}", module.docstring.value if module.docstring else ""]
    for name in public_names(module):
        one = target_of(module[name])
        text = render_object_docs(one, CONFIG)
        text = SIGNATURE.sub(one_argument_a_line, text)
        # A method's heading has the name that a user writes, without the module that defines it.
        text = text.replace(f"# `{one.path}.", f"# `{name}.")
        parts.append(text)
        for heading in re.findall(r"^#+ `([\w.]+)`$", text, re.MULTILINE):
            path = one.path + heading.removeprefix(name)
            places[path] = f"{module.path}.md#{re.sub(r'[^a-z0-9_-]', '', heading.lower())}"
    return "\n\n".join(part.strip() for part in parts) + "\n"


def one_argument_a_line(signature: re.Match[str]) -> str:
    """Break a signature that is too long for a line."""
    lines, depth = [""], 0
    for sign in signature[2]:
        depth += (sign in "([{") - (sign in ")]}")
        lines[-1] += sign
        if sign == "," and depth == 0:
            lines.append("")
    arguments = "\n".join(f"    {line.strip()}" for line in lines)
    return f"{signature[1]}\n{arguments},\n{signature[3]}"


def with_links(page: str, places: dict[str, str]) -> str:
    """Link what the reference has, and show all other names as code or plain text."""

    def link(found: re.Match[str]) -> str:
        place = places.get(found[2])
        return f"[{found[1]}]({place})" if place else found[1]

    def code(found: re.Match[str]) -> str:
        text = LINK.sub(link, found[1])
        parts = re.split(r"(\[[^\[\]]+\]\([^)]+\.md#[^)]+\))", text)
        return "".join(
            re.sub(r"^\[", "[`", p).replace("](", "`](") if i % 2 else as_code(p) for i, p in enumerate(parts)
        )

    return LINK.sub(link, TYPE.sub(code, page))


def linked_code(link: str) -> str:
    return f"[`{link[1:].replace('](', '`](')}"


def as_code(text: str) -> str:
    """Return text as inline code, with its outer blanks outside of it."""
    inner = text.strip()
    return text.replace(inner, f"`{inner}`") if inner else text


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "reference"
    logging.getLogger("griffe").setLevel(logging.ERROR)  # it wants an entry for each argument of "a, b: ..."
    loader = griffe.GriffeLoader(search_paths=[DOCS.parent], docstring_parser="google")
    package = loader.load("gdsdata")
    loader.resolve_aliases(implicit=False)
    modules = [package if name == "gdsdata" else package[name.removeprefix("gdsdata.")] for name in MODULES]
    if lacking := [name for module in modules for name in undocumented(module)]:
        sys.exit(f"public names without a docstring: {', '.join(lacking)}")
    places: dict[str, str] = {}
    pages = {module.path: page_of(module, places) for module in modules}
    for name, page in pages.items():
        (folder / f"{name}.md").write_text(with_links(page, places), encoding="utf-8")
        print(folder / f"{name}.md")


if __name__ == "__main__":
    main()
