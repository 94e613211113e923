"""Build the documentation site from the pages of the repository.

python docs/make_site.py [FOLDER]    # FOLDER: build/site

The pages are plain Markdown that is read in the repository too. So their text is copied into
build/docs-source, with three changes, before Sphinx makes HTML of it:

- A link to a file outside of docs/ becomes a link to a page with that file: Markdown as it is,
  data and pictures as downloads, everything else as a listing.
- A path of a program in examples/, as inline code, becomes a link to its listing.
- A picture (.svg) is put into the page, so that its colors follow the page's.

The order of the pages is that of the tables in docs/README.md. It is an error if a link or a path
leads nowhere, or if a diagram's steps are not those of the list below it; so are all warnings of
Sphinx.
"""

import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SOURCE = ROOT / "build" / "docs-source"
DOCTREES = ROOT / "build" / "docs-doctrees"

# A fenced block, inline code, a picture alone in its line, or the target of a link.
PARTS = re.compile(
    r"(?P<block>^```.*?^```$)|(?P<linked>\[`[^`]+`\](?=\())|(?P<code>(?<!`)`[^`]+`(?!`))"
    r"|(?P<picture>^!\[(?P<text>[^\]]*)\]\((?P<file>[^)\s]+\.svg)\)$)|\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
PATH = re.compile(r"`((?:benchmarks|configs|csrc|examples|gdsdata|tests)/[\w./-]+)`")
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".yaml": "yaml", ".toml": "toml"}
COPIED = {".csv", ".json", ".png", ".svg", ".webp"}
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Broken(Exception):
    """A page names what is not there."""


def place_of(file: Path) -> str:
    """Return where the site has a file of the repository, below its source folder."""
    if file == DOCS / "README.md":
        return "index.md"
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    place = f"repository/{file.relative_to(ROOT).as_posix()}"
    return place if file.suffix in {".md", *COPIED} else f"{place}.md"


class Site:
    """The source folder of the site, while it is filled."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.waiting: list[Path] = []  # files whose pages have to be written
        self.known: set[Path] = set()
        self.written: set[str] = set()

    def add(self, file: Path) -> str:
        """Have a file's page written, and return its place."""
        if file not in self.known:
            self.known.add(file)
            self.waiting.append(file)
        return place_of(file)

    def fill(self) -> None:
        while self.waiting:
            file = self.waiting.pop()
            content = file.read_bytes()
            if file.suffix == ".md":
                content = self.page(file, content.decode()).encode()
            elif file.suffix not in COPIED:
                content = self.listing(file, content.decode()).encode()
            self.write(place_of(file), content)

    def write(self, place: str, content: bytes) -> None:
        """Write a file of the source folder, unless it is the same already."""
        path = self.source / place
        self.written.add(place)
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def remove_others(self) -> None:
        """Remove what an earlier run has left in the source folder."""
        for path in self.source.rglob("*"):
            if path.is_file() and path.relative_to(self.source).as_posix() not in self.written:
                path.unlink()

    def listing(self, file: Path, text: str) -> str:
        name = file.relative_to(ROOT).as_posix()
        language = LANGUAGES.get(file.suffix, "text")
        fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=2))
        return f"---\norphan: true\n---\n\n# {name}\n\n{fence}{language}\n{text}\n{fence}\n"

    def page(self, file: Path, text: str) -> str:
        """Return a page with its links, paths and pictures as the site needs them."""
        place = place_of(file)

        def change(found: re.Match[str]) -> str:
            if found["picture"]:
                picture = drawing((file.parent / found["file"]).resolve(), found["text"])
                check_steps(picture, text[found.end() :], f"{file.relative_to(ROOT)}: {found['file']}")
                return picture
            if found["target"]:
                return f"]({self.link(file, place, found['target'])})"
            if found["code"] and (path := PATH.fullmatch(found["code"])):
                target = ROOT / path[1]
                # Pages that say how to add a file name it; `a/b` may stand for a/b.cpp and a/b.h.
                to_be_made = file.name.startswith("how-to-")
                if not (target.exists() or to_be_made or any(target.parent.glob(f"{target.name}.*"))):
                    raise Broken(f"{file.relative_to(ROOT)}: there is no {path[1]}")
                if target.suffix == ".py" and target.is_relative_to(ROOT / "examples"):
                    return f"[{found['code']}]({relative(self.add(target), place)})"
            return found[0]

        text = PARTS.sub(change, text)
        return f"---\norphan: true\n---\n\n{text}" if is_report(file) else text

    def link(self, file: Path, place: str, target: str) -> str:
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return target
        there = (file.parent / path).resolve()
        if not there.is_file() or not there.is_relative_to(ROOT):
            raise Broken(f"{file.relative_to(ROOT)}: the link {target} leads to no file of the repository")
        return relative(self.add(there), place) + (f"#{anchor}" if anchor else "")


def relative(place: str, page: str) -> str:
    return os.path.relpath(place, os.path.dirname(page) or ".")


def drawing(file: Path, text: str) -> str:
    """Return a picture as HTML, with the text that stands for it."""
    if not file.is_file():
        raise Broken(f"there is no picture {file}")
    svg = re.sub(r"^<\?xml[^>]*>\s*", "", file.read_text(encoding="utf-8")).strip()
    svg = re.sub(r"^(<svg[^>]*?) role=(\"img\"|'img')", r"\1", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(" ".join(text.split()), quote=True)}" ', 1)
    kind = "drawing" if 'class="drawn"' in svg else "picture"
    return f'```{{raw}} html\n<figure class="{kind}" id="{file.stem}">\n{svg}\n</figure>\n```'


def check_steps(picture: str, below: str, where: str) -> None:
    """Refuse a diagram whose steps are not those of the ordered list in the section below it."""
    steps = picture.count('class="step"')
    section = re.split(r"^#+ ", below, maxsplit=1, flags=re.MULTILINE)[0]
    items = len(re.findall(r"^\d+\. ", section, re.MULTILINE))
    if steps and items != steps:
        raise Broken(f"{where} has {steps} steps, but the list below it has {items} items: each needs the other")


# ------------------------------------------------------------------------------------------------------- navigation

# Sections of pages that no table of docs/README.md names, by their folders.
FOLDERS = {"guide": "Guide", "internals": "Internals", "migrate": "Other loaders", "reference": "Reference"}


def navigation(site: Site) -> dict[str, list[str]]:
    """Return the places of the pages of each section, in the order of docs/README.md."""
    sections: dict[str, list[str]] = {}
    seen = {"index.md"}
    section = "Start"
    for line in (DOCS / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:].strip()
        for target in LINK.findall(line):
            place = target.partition("#")[0]
            if place.endswith(".md") and not place.startswith("..") and place not in seen:
                seen.add(place)
                sections.setdefault(section, []).append(place)
    for place in sorted(site.written - seen, key=lambda place: place.removesuffix(".md")):
        if place.endswith(".md") and not place.startswith("repository/"):
            folder = place.split("/")[0] if "/" in place else ""
            sections.setdefault(FOLDERS.get(folder, "More"), []).append(place)
    sections["Reference"].sort(key=lambda place: not place.startswith("reference/"))
    sections["Repository"] = repository_pages(site)
    return sections


def repository_pages(site: Site) -> list[str]:
    """Return the entries of pages outside of docs/ that have a place in the navigation."""
    entries = []
    for file in sorted(site.known):
        if file.suffix == ".md" and not file.is_relative_to(DOCS) and not is_report(file):
            name = f"Results, {file.parent.name}" if file.is_relative_to(ROOT / "benchmarks") else file.stem
            entries.append(f"{name.capitalize()} <{place_of(file).removesuffix('.md')}>")
    return entries


def is_report(file: Path) -> bool:
    """Return whether a file is a report of the bench: only the page of its machine links to it."""
    return file.is_relative_to(ROOT / "benchmarks") and file.name != "README.md"


def toctree(caption: str, places: list[str]) -> str:
    entries = "\n".join(place.removesuffix(".md") for place in places)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def assemble() -> None:
    """Write the source folder."""
    reference = ROOT / "build" / "docs-reference"
    reference.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, DOCS / "make_reference.py", reference], check=True, stdout=subprocess.DEVNULL)
    site = Site(SOURCE)
    for page in reference.glob("gdsdata*.md"):
        site.write(f"reference/{page.name}", page.read_bytes())
    for page in DOCS.rglob("*.md"):
        if not page.name.startswith("gdsdata"):  # those of `make reference`
            site.add(page)
    for name in ("README.md", "CONTRIBUTING.md"):
        site.add(ROOT / name)
    site.fill()
    front = (SOURCE / "index.md").read_text(encoding="utf-8")
    trees = "".join(toctree(caption, places) for caption, places in navigation(site).items())
    site.write("index.md", (front + trees).encode())
    site.remove_others()


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    try:
        assemble()
    except Broken as error:
        sys.exit(f"make docs: {error}")
    from sphinx.cmd.build import main as build

    options = ["-q", "-W", "--keep-going", "-n", "-c", str(DOCS / "site"), "-d", str(DOCTREES)]
    if status := build(["-b", "html", *options, str(SOURCE), str(out)]):
        sys.exit(status)
    print(out / "index.html")


if __name__ == "__main__":
    main()
