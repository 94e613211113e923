"""Write the tables of packages in docs/licenses.md.

    python docs/make_licenses.py                    # reads the packages that are installed
    python docs/make_licenses.py --path FOLDER      # and those in a folder of pip install --target

A package that is found nowhere keeps the license that the page has. tests/test_licenses.py fails if
pyproject.toml or one of the files in REQUIREMENTS names a package that the page lacks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licenses.md"
# Files of requirements, by what they are for.
REQUIREMENTS = {
    "frameworks": ROOT / "tests" / "frameworks.txt",
    "wheels": ROOT / ".ci" / "wheel-tools.txt",
    "docs": ROOT / "docs" / "site" / "requirements.txt",
    "browser": ROOT / "docs" / "site" / "browser.txt",
}
_BEGIN, _END = "<!-- packages: docs/make_licenses.py writes what follows -->", "<!-- end of packages -->"
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?\s*([^;]*)")
_USES = {
    "required": "`import gdsdata`",
    "azure": "`gdsdata[azure]`",
    "bench": "`gdsdata[bench]`",
    "gcs": "`gdsdata[gcs]`",
    "images": "`gdsdata[images]`",
    "integrations": "`gdsdata[integrations]`",
    "peers": "`gdsdata[peers]`",
    "s3": "`gdsdata[s3]`",
    "tables": "`gdsdata[tables]`",
    "top": "`gdsdata[top]`",
    "zstd": "`gdsdata[zstd]`",
    "test": "`gdsdata[test]`",
    "lint": "`gdsdata[lint]`",
    "build": "building",
    "frameworks": "`make test-frameworks`",
    "wheels": "`make wheels`, `make sdist`",
    "docs": "`make docs`",
    "browser": "`make test-site`",
}
# The texts in their packages, where the metadata has no SPDX expression, and words that name
# several licenses, or another one.
_BY_TEXT = {
    "accelerate": "Apache-2.0",
    "arrow": "Apache-2.0",
    "clang-format": "Apache-2.0 WITH LLVM-exception",
    "datasets": "Apache-2.0",
    "deepspeed": "Apache-2.0",
    "distro": "Apache-2.0",
    "google-auth": "Apache-2.0",
    "hjson": "MIT OR AFL-2.1",
    "jinja2": "BSD-3-Clause",
    "matplotlib": "LicenseRef-matplotlib (of the kind of PSF-2.0)",
    "megatron-core": "Apache-2.0 AND BSD-3-Clause",
    "mosaicml": "Apache-2.0",
    "mosaicml-cli": "NOASSERTION",
    "mosaicml-streaming": "Apache-2.0",
    "peft": "Apache-2.0",
    "prompt-toolkit": "BSD-3-Clause",
    "protobuf": "BSD-3-Clause",
    "python-snappy": "BSD-3-Clause",
    "pytorch-ranger": "Apache-2.0",
    "s3fs": "BSD-3-Clause",
    "safetensors": "Apache-2.0",
    "spmd-types": "BSD-3-Clause",
    "tensorboard": "Apache-2.0",
    "tensorboard-data-server": "Apache-2.0",
    "torch-checkpointing": "BSD-3-Clause",
    "torch-optimizer": "Apache-2.0",
    "torchao": "BSD-3-Clause",
    "torchdata": "BSD-3-Clause",
    "torchtitan": "BSD-3-Clause",
    "torchvision": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "wcwidth": "MIT",
    "zstd": "BSD-2-Clause",
}
_SAME = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
}


def canonical(name: str) -> str:
    """Return a package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named() -> Iterator[tuple[str, str, str, str]]:
    """Yield use, canonical name, name and versions of each package that the project names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = {
        "required": project["project"]["dependencies"],
        **project["project"]["optional-dependencies"],
        "build": project["build-system"]["requires"],
        **{use: _lines(path) for use, path in REQUIREMENTS.items()},
    }
    for use, requirements in lists.items():
        for requirement in requirements:
            found = _REQUIREMENT.match(requirement)
            assert found is not None, requirement
            if canonical(found[1]) != "gdsdata":
                yield use, canonical(found[1]), found[1], found[2].strip() or "any"


def _lines(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def listed() -> dict[tuple[str, str], str]:
    """Return the licenses that the page has, by use and canonical name."""
    rows = re.findall(r"^\| `([^|`]+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    uses = {shown: use for use, shown in _USES.items()}
    return {(uses[use], canonical(name)): license for name, license, use in rows if use in uses}


def installed(paths: Sequence[str]) -> dict[str, str]:
    """Return the licenses of installed packages by canonical name, if their metadata says one."""
    found = {}
    for one in [*importlib.metadata.distributions(), *importlib.metadata.distributions(path=list(paths))]:
        metadata = one.metadata
        name = canonical(metadata["Name"] or "")
        classifiers = [
            value.split(" :: ")[-1] for value in metadata.get_all("Classifier") or [] if "License ::" in value
        ]
        words = [metadata.get("License-Expression"), _BY_TEXT.get(name), metadata.get("License"), *classifiers]
        said = next((word for word in words if word), "")
        found[name] = _SAME.get(said, said)
    return found


def rows(paths: Sequence[str]) -> list[str]:
    """Return the page's tables."""
    known, there = listed(), installed(paths)
    written = ["| package | versions | license (SPDX) | for |", "|---|---|---|---|"]
    for use, place, name, versions in sorted(named(), key=lambda one: (list(_USES).index(one[0]), one[1])):
        license = there.get(place) or known.get((use, place))
        if not license:
            raise SystemExit(
                f"{name} is not installed, and docs/licenses.md does not have it: install it, or use --path"
            )
        written.append(f"| `{name}` | {versions} | {license} | {_USES[use]} |")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="append", default=[], help="a folder of pip install --target")
    given = parser.parse_args()
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text("\n".join([f"{before}{_BEGIN}", "", *rows(given.path), "", f"{_END}{after}"]))


if __name__ == "__main__":
    main()
