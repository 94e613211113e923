"""Check the prose of pages, comments, docstrings and test names against docs/internals/style.md.

    python tests/check_prose.py             # exit status 1 if counts differ from the allowed ones
    python tests/check_prose.py PATH ...    # show every finding in these files, allowed or not
    python tests/check_prose.py --update    # write the allowed counts; their sum may only shrink

`tests/prose_allowed.txt` says how many findings of each rule a file may have. A file that has fewer
must lower its count, so the list only shrinks. If files are moved or split, ``--update`` moves
their counts.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = Path(__file__).resolve().with_name("prose_allowed.txt")
SUFFIXES = {".md", ".py", ".cpp", ".h", ".cu", ".c"}
# The bench's own reports, and recorded machines.
SKIPPED = re.compile(r"benchmarks/results/[^/]+/(?!README\.md)|tests/evidence/|docs/reference/(?!README\.md)")

WIDTH = 100
MOST_WORDS = 35
OPENINGS = {"Who", "Whoever", "What", "Of", "Whose"}
MOST_NAME_CHARACTERS = 80
# The name of a test may go on from that of its class: TestRows, test_of_a_shard_are_read.
NAME_OPENINGS = {"who", "whoever", "what", "whatever"}
WORDS = {  # {what is found: what to write}
    r"(gets?|got|getting|gotten|makes?|made|making) ready": "allocate, prepare",
    r"(lends?|lent|lending)": "allocate, share",
    r"(lets?|letting) go": "release",
    r"(gives?|gave|given|giving) back": "release, return",
    r"(goes|go|went|going) together": "group",
    r"(brings?|brought|bringing)": "read, copy, load",
    r"(tells?|told|telling)(?!.{0,60}?\b(apart|from)\b)": "notify, report, say",
    r"to be had": "available",
    r"whoever": "the caller, the thread, the program",
}
BRITISH = re.compile(
    r"\b\w*(behaviour|colour|neighbour|favour|honour|labelled|cancelled|modelled|grey|centre\b|licence|catalogue)\w*|"
    r"\b(re|un|de)?(initial|recogn|synchron|serial|optim|organ|normal|material|util|real|special|summar|general|minim|"
    r"maxim|priorit|parallel|random|vector|token|emphas|categor|final|visual)is(e|es|ed|er|ers|ing|ation|ations)\b",
    re.IGNORECASE,
)
WORD_PATTERNS = [
    (re.compile(rf"\b{pattern}\b", re.IGNORECASE | re.DOTALL), instead) for pattern, instead in WORDS.items()
]
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|Fig|Sec|No)\.$")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_`]*[A-Z0-9`])")


class Passage(NamedTuple):
    """Text that is read as a unit: a paragraph, an item or a comment.

    Attributes:
        line: where it begins, from 1.
        text: with single spaces, and CODE in place of code.
        is_prose: false for a cell of a table, which may be a fragment.
    """

    line: int
    text: str
    is_prose: bool = True


class Finding(NamedTuple):
    line: int
    rule: str
    message: str


# ---------------------------------------------------------------------------------------------- from files to passages


def plain(text: str) -> str:
    """Remove markup: code becomes the word CODE, a link its text."""
    text = re.sub(r"``[^`]+``|`[^`]+`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "URL", text)
    return " ".join(text.split())


# An item, ``name: text``, ``CorruptData, IoError: text``, ``Args:``.
_ENTRY = re.compile(r"([-*]|\d+\.) |[a-z_`*][\w`*, ./-]{0,40}: |[A-Z]\w*(, [A-Z]\w*)*: |[A-Z]\w+:$")


def paragraphs(lines: list[str], first_line: int = 1) -> Iterator[Passage]:
    """Join lines of prose to paragraphs. Items and ``name: text`` entries have their own."""
    begun, text = first_line, []
    for number, line in enumerate(lines, first_line):
        bare = line.strip()
        if text and (not bare or _ENTRY.match(bare)):
            yield Passage(begun, plain(" ".join(text)))
            text = []
        if bare:
            begun = begun if text else number
            text.append(re.sub(r"^([-*]|\d+\.) ", "", bare))
    if text:
        yield Passage(begun, plain(" ".join(text)))


def markdown(source: str) -> tuple[list[Passage], list[tuple[int, str]]]:
    """Return the passages, and the lines of prose whose width is checked."""
    passages, wide, run, run_at, is_code = [], [], [], 1, False

    def end_run() -> None:
        passages.extend(paragraphs(run, run_at))
        run.clear()

    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        if re.match(r"(```|~~~)", bare):
            is_code = not is_code
            end_run()
        elif is_code or (line.startswith("    ") and not run):
            continue
        elif bare.startswith("|"):
            end_run()
            cells = re.sub(r"`[^`]*`", "CODE", bare).strip("|").split("|")
            passages.extend(Passage(number, plain(cell), is_prose=False) for cell in cells if re.search(r"\w", cell))
        elif bare.startswith("#"):
            end_run()
            passages.append(Passage(number, plain(bare.lstrip("# ")), is_prose=False))
        else:
            if not run:
                run_at = number
            if bare:
                run.append(line)
                wide.append((number, line))
            else:
                end_run()
    end_run()
    return passages, wide


_COMMAND = re.compile(
    r" {4,}(python|torchrun|pip|git|make (-f|test|bench|fuzz|lint)|>>>|\$|import|from \w+ import) ?\S"
)
_RULER = re.compile(r"^[-=#*/ ]*$|^-{3,}|-{3,}$|^(noqa|type:|fmt:|ruff:|!)|^\s*$")


def python(source: str) -> tuple[list[Passage], list[tuple[int, str]]]:
    passages, wide = [], []
    lines = source.splitlines()
    for first, last, text in docstrings(source):
        shown = ["" if _COMMAND.match(line) else line for line in inspect.cleandoc(text).splitlines()]
        lead = text[: len(text) - len(text.lstrip())].count("\n")
        passages.extend(paragraphs(shown, first + lead))
        wide += [(n, lines[n - 1]) for n in range(first, last + 1) if not _COMMAND.match(lines[n - 1].strip("\"' "))]
    comments = [
        (token.start[0], token.start[1], token.string)
        for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
        if token.type == tokenize.COMMENT
    ]
    block: list[tuple[int, str]] = []
    column_before, line_before = -1, -1
    for line, column, comment in comments:
        text = comment.lstrip("#").removeprefix(":").strip()
        is_alone = not lines[line - 1][:column].strip()
        if not (is_alone and block and column == column_before and line == line_before + 1):
            passages.extend(paragraphs([text for _, text in block], block[0][0] if block else 1))
            block = []
        if not _RULER.search(text):
            block.append((line, text))
            if is_alone:
                wide.append((line, lines[line - 1]))
        column_before, line_before = (column if is_alone else -1), line
    passages.extend(paragraphs([text for _, text in block], block[0][0] if block else 1))
    return passages, wide


@functools.lru_cache(maxsize=1)  # a file's docstrings and its tests' names need the same tree
def definitions(source: str) -> list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def docstrings(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield (first line, last line, text) of each docstring."""
    for node in definitions(source):
        if node.body:
            found = node.body[0]
            text = found.value.value if isinstance(found, ast.Expr) and isinstance(found.value, ast.Constant) else None
            if isinstance(text, str):
                yield found.lineno, found.end_lineno or found.lineno, text


_CPP = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
)


def cpp(source: str) -> tuple[list[Passage], list[tuple[int, str]]]:
    passages, wide = [], []
    lines = source.splitlines()
    block: list[str] = []
    begun, line_before, at, line = 1, -1, 0, 1
    for found in _CPP.finditer(source):
        line += source.count("\n", at, found.start())
        at = found.start()
        comment = found[0]
        if not comment.startswith("/"):
            continue
        if comment.startswith("/*"):
            texts = [one.strip(" */") for one in comment.splitlines()]
            passages.extend(paragraphs(texts, line))
            continue
        text = comment.lstrip("/").strip()
        is_alone = lines[line - 1].lstrip().startswith("//")
        if not (is_alone and block and line == line_before + 1):
            passages.extend(paragraphs(block, begun))
            block, begun = [], line
        is_drawing = re.search(r"-->|\s{3,}", comment.lstrip("/").rstrip()) is not None
        block.append("" if is_drawing or _RULER.search(text) else text)
        if is_alone and not is_drawing:
            wide.append((line, lines[line - 1]))
        line_before = line if is_alone else -1
    passages.extend(paragraphs(block, begun))
    return passages, wide


# ---------------------------------------------------------------------------------------------------------- test names


def python_test_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each test's name."""
    for node in definitions(source):
        if not isinstance(node, ast.Module) and node.name.startswith("test_"):
            yield node.lineno, node.name.removeprefix("test_").replace("_", " ")


_CPP_TEST = re.compile(r"^(?:TYPED_)?TEST(?:_[FP])?\(\w+,\s*(\w+)\)", re.MULTILINE)
_WORD_BEGINS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def cpp_test_names(source: str) -> Iterator[tuple[int, str]]:
    for found in _CPP_TEST.finditer(source):
        yield source.count("\n", 0, found.start()) + 1, _WORD_BEGINS.sub(" ", found[1]).lower()


def name_findings(line: int, words: str) -> Iterator[Finding]:
    for pattern, instead in WORD_PATTERNS:
        for match in pattern.finditer(words):
            yield Finding(line, "name", f'"{match[0]}" in the name of a test: write {instead}')
    for match in BRITISH.finditer(words):
        yield Finding(line, "name", f'"{match[0]}" in the name of a test is not American')
    first = words.partition(" ")[0]
    if first in NAME_OPENINGS:
        yield Finding(line, "name", f"the name of a test opens with {first}: name its subject")
    if len(words) > (most := MOST_NAME_CHARACTERS):
        yield Finding(line, "name", f'"{words[:30]} ..." has {len(words)} characters, and the most is {most}')


# ------------------------------------------------------------------------------------------------------ from passages


def sentences(text: str) -> Iterator[str]:
    begun = 0
    for end in SENTENCE_END.finditer(text):
        if not ABBREVIATIONS.search(text[begun : end.start()]):
            yield text[begun : end.start()]
            begun = end.end()
    yield text[begun:]


def findings(source: str, suffix: str) -> list[Finding]:
    """Check a file's prose and its tests' names against all rules."""
    passages, wide = {".md": markdown, ".py": python}.get(suffix, cpp)(source)
    found = []
    for passage in passages:
        for pattern, instead in WORD_PATTERNS:
            for match in pattern.finditer(passage.text):
                found.append(Finding(passage.line, "word", f'"{match[0]}": write {instead}'))
        for match in BRITISH.finditer(passage.text):
            found.append(Finding(passage.line, "spelling", f'"{match[0]}" is not American'))
        if not passage.is_prose:
            continue
        for sentence in sentences(passage.text):
            words = re.findall(r"[\w'’.,/=-]*\w[\w'’]*", sentence)
            beginning = " ".join(words[:6])
            if words and words[0] in OPENINGS and not sentence.rstrip("\"')*_").endswith("?"):
                found.append(Finding(passage.line, "opening", f'"{beginning} ..." opens with {words[0]}'))
            if len(words) > MOST_WORDS:
                found.append(Finding(passage.line, "length", f'"{beginning} ..." has {len(words)} words'))
    for number, line in wide:
        breakable = re.sub(r"`[^`]{50,}`|\(?https?://\S{50,}", "", line)
        if len(line) > WIDTH and (breakable == line or len(breakable) > WIDTH):
            found.append(Finding(number, "width", f"{len(line)} columns, and prose wraps at {WIDTH}"))
    names = {".md": lambda _: (), ".py": python_test_names}.get(suffix, cpp_test_names)
    for number, words in names(source):
        found.extend(name_findings(number, words))
    return sorted(found)


def files() -> list[Path]:
    said = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    there = {name for name in said.split("\0") if Path(name).suffix in SUFFIXES and not SKIPPED.search(name)}
    return [ROOT / name for name in sorted(there) if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def findings_of(path: Path) -> list[Finding]:
    return findings(path.read_text(), path.suffix)


# ------------------------------------------------------------------------------------------------------ what is allowed

Counts = dict[tuple[str, str], int]  # by file and rule


def read_allowed(text: str) -> Counts:
    rows = (line.rsplit(maxsplit=2) for line in text.splitlines() if line and not line.startswith("#"))
    return {(name, rule): int(count) for name, rule, count in rows}


def written_allowed(counts: Counts) -> str:
    head = (
        "# Findings of tests/check_prose.py that a file may still have: file, rule, how many. This list only shrinks.\n"
    )
    return head + "".join(f"{name} {rule} {count}\n" for (name, rule), count in sorted(counts.items()) if count)


def complaints(found: dict[str, list[Finding]], allowed: Counts) -> list[str]:
    """Say which files have more findings than are allowed, or fewer: both must be settled."""
    counts = Counter((name, one.rule) for name, ones in found.items() for one in ones)
    said = []
    for name, rule in sorted({*counts, *allowed}):
        has, may = counts[name, rule], allowed.get((name, rule), 0)
        if has > may:
            said += [f"{name}:{one.line}: {one.rule}: {one.message}" for one in found[name] if one.rule == rule]
            said.append(f"{name}: {has} findings of {rule}, and {may} are allowed")
        elif has < may:
            said.append(f"{name}: {may} findings of {rule} are allowed, and it has {has}: run {_UPDATE}")
    return said


_UPDATE = "python tests/check_prose.py --update"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="show all findings in these files")
    parser.add_argument("--update", action="store_true", help="write the counts; refused if their sum grows")
    args = parser.parse_args(arguments)
    if args.paths:
        shown = [(path, one) for path in args.paths for one in findings_of(path)]
        print("".join(f"{path}:{one.line}: {one.rule}: {one.message}\n" for path, one in shown), end="")
        return bool(shown)
    found = {path.relative_to(ROOT).as_posix(): findings_of(path) for path in files()}
    allowed = read_allowed(ALLOWED.read_text()) if ALLOWED.exists() else None
    if args.update:
        counts = Counter((name, one.rule) for name, ones in found.items() for one in ones)
        if allowed is not None and counts.total() > sum(allowed.values()):
            print(f"{counts.total()} findings are more than the {sum(allowed.values())} that were allowed: mend some")
            return 1
        ALLOWED.write_text(written_allowed(counts))
        return 0
    said = complaints(found, allowed or {})
    print("".join(f"{line}\n" for line in said), end="")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
