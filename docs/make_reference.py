"""Write docs/reference/*.md, one page for each public module, from the docstrings.

python docs/make_reference.py [FOLDER]    # FOLDER: docs/reference
"""

import sys
from pathlib import Path

import griffe
from griffe2md import render_object_docs

DOCS = Path(__file__).resolve().parent
# Public modules (docs/policies.md): their names are in `__all__`, except for the exceptions.
MODULES = ("gdsdata", "gdsdata.formats", "gdsdata.decoders", "gdsdata.safetensors", "gdsdata.errors")
CONFIG = {"heading_level": 2, "show_root_full_path": False, "show_root_heading": True, "members_order": "source"}


def public_names(module: griffe.Module) -> list[str]:
    """Return the public names of a module that are not modules, in its order."""
    here = [name for name, one in module.members.items() if not one.is_alias and one.is_public]
    names = module.exports or [name for name in here if not module[name].is_attribute]
    return [str(name) for name in names if not module[str(name)].is_module]


def page_of(module: griffe.Module) -> str:
    """Return a module's page: its docstring, then each public name."""
    parts = [f"# {module.path}", module.docstring.value if module.docstring else ""]
    for name in public_names(module):
        one = module[name]
        parts.append(render_object_docs(one.final_target if one.is_alias else one, CONFIG))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "reference"
    loader = griffe.GriffeLoader(search_paths=[DOCS.parent], docstring_parser="google")
    package = loader.load("gdsdata")
    loader.resolve_aliases(implicit=False)
    for name in MODULES:
        module = package if name == "gdsdata" else package[name.removeprefix("gdsdata.")]
        (folder / f"{name}.md").write_text(page_of(module), encoding="utf-8")
        print(folder / f"{name}.md")


if __name__ == "__main__":
    main()
