"""The prose check finds what docs/internals/style.md forbids, and nothing in code."""

import subprocess
import sys
from pathlib import Path

import check_prose
import pytest
from check_prose import complaints, findings, read_allowed, written_allowed

LONG = "One " + "more " * 10 + "\n" + "more " * 15 + "\n" + "more " * 10 + "word."


def rules(source, suffix=".md"):
    return [one.rule for one in findings(source, suffix)]


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("Text. What it reads is right.\n", "opening"),
        ("- Of these, two are read.\n", "opening"),
        ("It ends. Whose\nfile this is: unknown.\n", "opening"),
        (LONG + "\n", "length"),
        ("It is ready before the worker lets\ngo of it.\n", "word"),
        ("| the caller is told |\n", "word"),
        ("Its behaviour is known.\n", "spelling"),
        ("It synchronises the file.\n", "spelling"),
        ("It is wide: " + "word " * 18 + "\n", "width"),
    ],
)
def test_each_rule_finds_what_it_forbids_in_a_page(source, rule):
    assert rules(source) == [rule]


@pytest.mark.parametrize(
    "source",
    [
        "What does it read? It reads files.\n",
        "It calls `tell()`, see [what it does](https://example.org/behaviour).\n",
        "```python\nWhat = 'Of this, whoever lets go is told'  # " + "a long line " * 9 + "\n```\n",
        "    Whoever = lets.go(told)\n",
        "It tells data from other data. Its bytes cannot be told apart.\n",
        f"| {'cell ' * 40} |\n",
        "One sentence, e.g. Of course this. " + "It is short. " * 5 + "\n",
        "It runs this:\n`python -m gdsdata.bench " + "case.setting=value " * 8 + "`.\n",
    ],
    ids=range(8),
)
def test_code_tables_questions_and_short_sentences_are_left_alone(source):
    assert rules(source) == []


def test_comments_and_docstrings_of_python_are_read_and_other_strings_are_not():
    source = '''"""Page.

What it has.

    python -m gdsdata.bench whoever is told
"""
TEXT = "What is told # Whoever"
number = 1  # Of these one
# A comment that goes
# on. Who reads it?
# Who reads it knows.


def read():
    """Read.

    Raises:
        CorruptData: the file is told.
    """
'''
    found = [(one.line, one.rule) for one in findings(source, ".py")]
    assert found == [(3, "opening"), (8, "opening"), (9, "opening"), (18, "word")]


def test_comments_of_cpp_are_read_and_strings_and_drawings_are_not():
    source = """// What it does.
const char* text = "// Whoever is told";  // Of this
const char* raw = R"(// Whoever)";
// a worker's segment --> told
/* Whose is this.
   It lets go. */
"""
    found = [(one.line, one.rule) for one in findings(source, ".cpp")]
    assert found == [(1, "opening"), (2, "opening"), (5, "opening"), (5, "word")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("links_in_a_circle_are_told", '"told" in the name'),
        ("a_crash_lets_go_of_the_folder", '"lets go" in the name'),
        ("what_is_no_file_is_refused", "opens with what"),
        ("whatever_is_damaged_is_refused", "opens with whatever"),
        ("a_format_is_recognised", '"recognised" in the name of a test is not American'),
        ("a_file_" + "that_is_long_" * 6 + "is_refused", "has 95 characters, and the most is 80"),
    ],
)
def test_the_name_of_a_test_has_a_subject_and_the_fields_words(name, words):
    camel = "".join(word.capitalize() for word in name.split("_"))
    sources = {
        ".py": f"class TestIt:\n    def test_{name}(self):\n        pass\n",
        ".cpp": f"namespace {{\nTEST_F(Suite, {camel}) {{}}\n",
    }
    for suffix, source in sources.items():
        (found,) = findings(source, suffix)
        assert (found.line, found.rule) == (2, "name") and words in found.message


def test_other_names_and_names_that_go_on_from_a_class_are_left_alone():
    python = "def what_is_told():\n    pass\n\n\ndef test_of_a_shard_are_rows_that_are_told_from_others():\n    pass\n"
    assert rules(python, ".py") == [] and rules('TEXT = """\ndef test_what_is_told(): ...\n"""\n', ".py") == []
    assert rules("TEST(Crc32, OfPartsIsThatOfTheWhole) {}\nint what_is_told() {}\n", ".cpp") == []


def test_the_place_of_a_finding_is_the_line_where_its_paragraph_begins():
    (found,) = findings("# Title\n\nRight.\nRight too.\n\nText\nand text. Of this.\n", ".md")
    assert (found.line, found.message) == (6, '"Of this ..." opens with Of')


def test_more_findings_than_allowed_are_shown_and_fewer_must_be_written_down():
    found = {"a.md": findings("What it is.\n\nWhat it has.\n", ".md"), "b.md": []}
    assert complaints(found, {("a.md", "opening"): 2}) == []
    more = complaints(found, {("a.md", "opening"): 1})
    assert len(more) == 3 and more[0].startswith("a.md:1: opening: ") and "2 findings" in more[-1]
    (fewer,) = complaints(found, {("a.md", "opening"): 3, ("b.md", "word"): 0})
    assert "3 findings of opening are allowed, and it has 2" in fewer
    (gone,) = complaints(found, {("a.md", "opening"): 2, ("gone.md", "word"): 1})
    assert gone.startswith("gone.md: 1 findings of word are allowed, and it has 0")


def test_the_list_is_read_as_it_is_written():
    counts = {("a file.md", "word"): 2, ("b.py", "width"): 10, ("c.py", "word"): 0}
    assert read_allowed(written_allowed(counts)) == {("a file.md", "word"): 2, ("b.py", "width"): 10}


def test_an_update_moves_counts_between_files_and_refuses_a_larger_sum(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    monkeypatch.setattr(check_prose, "ALLOWED", tmp_path / "allowed.txt")
    monkeypatch.setattr(check_prose, "files", lambda: sorted(tmp_path.glob("*.md")))
    (tmp_path / "new.md").write_text("What it is.\n")
    (tmp_path / "allowed.txt").write_text("old.md opening 1\n")
    assert check_prose.main([]) == 1
    assert check_prose.main(["--update"]) == 0 and check_prose.main([]) == 0
    (tmp_path / "more.md").write_text("What it has.\n")
    capsys.readouterr()
    assert check_prose.main(["--update"]) == 1 and "2 findings are more than the 1" in capsys.readouterr().out
    assert check_prose.main([str(tmp_path / "more.md")]) == 1


@pytest.mark.skipif(not (check_prose.ROOT / ".git").exists(), reason="not a checkout")
def test_all_files_of_the_project_have_what_is_allowed_and_no_more():
    done = subprocess.run([sys.executable, Path(check_prose.__file__)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
