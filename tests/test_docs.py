"""The documentation's examples run, its commands exist, and its links lead somewhere."""

import ast
import contextlib
import dataclasses
import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import forget_stores

import gdsdata
from gdsdata import EngineOptions
from gdsdata.checkpoint.background import checkpointer

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "docs").exists():
    pytest.skip("no docs/ beside these tests", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quick_programs")

WRITTEN = {*(ROOT / "docs" / "reference").glob("gdsdata*.md")}  # by `make reference`
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")} - WRITTEN)
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAMPLES = 130
# The words after `python` (docs/internals/site.md), apart from `skip: the reason`.
LEFT_OUT_ON_A_CPU, LEFT_OUT_ON_A_GPU = {"gpu"}, {"ranks", "bucket"}


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language):
    """Yield (the words after the language, the code) of each block.

    Empty lines stand before the code, so that errors have the page's line numbers.
    """
    text = page.read_text()
    for found in BLOCK.finditer(text):
        if found[1] == language:
            yield found[2].strip(), "\n" * (text[: found.start()].count("\n") + 1) + found[3]


def outputs(page):
    """Return {line of an example: the output that the page shows below it}."""
    shown, line = {}, None
    text = page.read_text()
    for found in BLOCK.finditer(text):
        if found[1] == "text" and found[2].strip() == "output":
            shown[line] = found[3]
        line = text[: found.start()].count("\n") + 1
    return shown


def has_examples(page):
    return any(not how.startswith("skip") for how, _ in blocks(page, "python"))


PAGES_WITH_EXAMPLES = list(filter(has_examples, PAGES))


def write_shard(path, folder=""):
    """Write samples of a JPEG and its class, whose keys begin with a folder."""
    from PIL import Image

    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as shard:
        for i in range(20):
            jpeg = BytesIO()
            Image.new("RGB", (30 + i, 20), (i, 2 * i, 3 * i)).save(jpeg, "jpeg")
            for extension, content in (("jpg", jpeg.getvalue()), ("cls", str(i % 3).encode())):
                member = tarfile.TarInfo(f"{folder}{i:03}.{extension}")
                member.size = len(content)
                shard.addfile(member, BytesIO(content))


@pytest.fixture
def readers_folder(tmp_path, monkeypatch):
    """Create the files that the pages mention, in the current folder."""
    pytest.importorskip("torchvision")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("train.bin", "code.bin", "text.bin"):
        np.arange(SAMPLES * 1024 + 1, dtype=np.uint16).tofile(name)
    np.arange(64, dtype=np.uint8).tofile("samples.rec")
    Path("shards").mkdir()
    write_shard("shards/a.tar")
    write_shard("photos.tar", "photos/dog/")
    Path("volumes").mkdir()
    pq.write_table(pa.table({"ids": [[7] * (1 + i % 5) for i in range(40)]}), "text.parquet")
    for i in range(16):
        np.save(f"volumes/{i}.npy", np.full((2, 3), i, np.float32))


def known_to_readers(device):
    """Make the model, the optimizer and the data set that are the reader's own.

    A page imports the rest itself, so that it can be pasted.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 4, device=device)).sum().backward()
    optimizer.step()
    tokens = gdsdata.formats.Tokens("uint16", seq_len=1024)
    dataset = gdsdata.GDSDataset("train.bin", 8, tokens, device=device)
    return {"model": model, "optimizer": optimizer, "dataset": dataset, "ds": dataset}


@contextlib.contextmanager
def one_rank(known):
    """Be the only rank of a group, with a mesh."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        dimensions = ("dp", "replicate", "tp")
        known["mesh"] = torch.distributed.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=dimensions)
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def bucket(seaweedfs, monkeypatch, tmp_path):
    """Have the objects that the pages mention in s3://bucket/, and a profile for its server."""
    server = dataclasses.replace(seaweedfs, bucket="bucket")
    server.client.create_bucket(Bucket="bucket")
    for i in range(4):
        server.put(f"train/{i}.tar", Path("shards/a.tar").read_bytes())
    tensors = {"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)}
    gdsdata.save(tensors, "model-1.safetensors")
    server.put("llama/model-1.safetensors", Path("model-1.safetensors").read_bytes())
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    server.put("llama/model.safetensors.index.json", json.dumps(index).encode())
    (tmp_path / "credentials").write_text(
        f"[training]\naws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    yield server
    for key in server.names():
        server.delete(key)
    server.client.delete_bucket(Bucket="bucket")
    forget_stores()


def run_examples(page, device, server=None):
    known, shown = known_to_readers(device), outputs(page)
    torch.manual_seed(0)
    for how, code in blocks(page, "python"):
        if how.startswith("skip") or how in (LEFT_OUT_ON_A_CPU if device == "cpu" else LEFT_OUT_ON_A_GPU):
            continue
        if how == "bucket":
            code = code.replace('"/nvme/', '"nvme/').replace("http://localhost:8333", server.endpoint_url)
        group = one_rank(known) if how == "ranks" else contextlib.nullcontext()
        with contextlib.redirect_stdout(StringIO()) as printed, group:
            exec(compile(code, str(page), "exec"), known)
        line = len(code) - len(code.lstrip("\n"))
        if line in shown and device == "cpu":
            assert_prints(printed.getvalue(), shown[line])


def assert_prints(printed, shown):
    """Compare what was printed with what a page shows, where "..." stands for any text."""
    checker = doctest.OutputChecker()
    assert checker.check_output(shown, printed, doctest.ELLIPSIS), (
        f"the page shows\n{shown}\nand the example prints\n{printed}"
    )


@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES, ids=name_of)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_examples_of_a_page_run_from_top_to_bottom(page, readers_folder, monkeypatch, request, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checkpointer, "DEFAULT_BASE", str(tmp_path))
    uses_bucket = any(how == "bucket" for how, _ in blocks(page, "python"))
    run_examples(page, "cpu", request.getfixturevalue("bucket") if uses_bucket else None)


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES, ids=name_of)
def test_examples_of_a_page_run_on_a_gpu(page, readers_folder):
    run_examples(page, "cuda")


def test_every_block_that_is_skipped_says_why():
    hows = [(name_of(page), how) for page in PAGES for how, _ in blocks(page, "python")]
    known = {"", *LEFT_OUT_ON_A_CPU, *LEFT_OUT_ON_A_GPU}
    others = [one for one in hows if one[1] not in known]
    assert len(others) > 10 and [one for one in others if not re.fullmatch(r"skip: \S+ \w.*", one[1])] == []


def test_examples_are_found_and_an_error_in_one_has_its_line(tmp_path):
    found = set(map(name_of, PAGES_WITH_EXAMPLES))
    assert {"README.md", "docs/guide/data-sets.md", "docs/internals/how-to-add-a-format.md"} <= found
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nfirst = 1\nsecond = first / 0\n```\n")
    ((how, code),) = blocks(page, "python")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile(code, str(page), "exec"), {})
    assert how == "" and caught.traceback[-1].lineno + 1 == 5


# ---------------------------------------------------------------------------------------------------------- commands


def commands():
    """Yield (page, words of the command) of each line in a block of commands."""
    for page in PAGES:
        for _, lines in blocks(page, "console"):
            for line in filter(None, lines.splitlines()):
                yield name_of(page), shlex.split(line, comments=True)


def commands_of(*program):
    """Return the commands that begin with these words; the last may be the beginning of a word."""
    *words, begin = program
    count = len(words)
    return [one for _, one in commands() if one[:count] == words and one[count].startswith(begin)]


def test_every_command_is_of_a_program_that_is_checked_here():
    checked = [*commands_of("python", "-m", "gdsdata.bench"), *commands_of("python", "-m", "gdsdata.doctor")]
    checked += [*commands_of("python", "benchmarks/"), *commands_of("python", "examples/")]
    checked += [*commands_of("python", "-m", "gdsdata.cache"), *commands_of("python", "-m", "gdsdata.top")]
    others = [(page, one) for page, one in commands() if one not in checked and one[0] not in ("pip", "git")]
    assert len(checked) > 20 and others == []


# Hydra prints the configuration of each command, and runs nothing. A wrong name or type is an
# error.
BENCH_COMMANDS = """
import json, runpy, sys
for arguments in json.load(sys.stdin):
    sys.argv = ["gdsdata.bench", *arguments, *([] if "--help" in arguments else ["--cfg", "job"])]
    try:
        runpy.run_module("gdsdata.bench", run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code
    if status:
        print(json.dumps(arguments), file=sys.stderr)
        sys.exit(1)
"""


def without_placeholders(arguments):
    """Remove placeholders: the class of another program, and the folder of an earlier run."""
    kept = [one for one in arguments if "my_package" not in one]
    if "--config-dir" in kept:
        at = kept.index("--config-dir")
        kept = kept[:at] + [one for one in kept[at + 2 :] if not one.startswith("engine=")]
    return kept


def ask(folder, *arguments, **how):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, *arguments]
    return subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, **how)


def test_commands_of_the_bench_name_settings_that_it_has(tmp_path):
    asked = [
        without_placeholders(one[3:])
        for one in commands_of("python", "-m", "gdsdata.bench")
        if one[2].endswith("bench")
    ]
    done = ask(tmp_path, "-c", BENCH_COMMANDS, input=json.dumps(asked))
    assert len(asked) > 15 and done.returncode == 0, done.stderr
    done = ask(tmp_path, "-c", BENCH_COMMANDS, input=json.dumps([[], ["case=io", "case.no_such_setting=1"]]))
    assert done.returncode == 1 and "no_such_setting" in done.stderr


@pytest.mark.parametrize("module", ["gdsdata.bench.compare", "gdsdata.cache", "gdsdata.doctor", "gdsdata.top"])
def test_commands_name_options_that_the_program_has(module, tmp_path):
    done = ask(tmp_path, "-m", module, "--help")
    assert done.returncode == 0, done.stderr
    asked = commands_of("python", "-m", module)
    assert asked
    for option in (word for one in asked for word in one if word.startswith("--")):
        assert option in done.stdout


def test_commands_of_scripts_name_files_that_are_there():
    for command in [*commands_of("python", "benchmarks/"), *commands_of("python", "examples/")]:
        assert not (ROOT / "csrc").exists() or (ROOT / command[1]).exists(), command


# ------------------------------------------------------------------------------------------------------- the pages


def anchors(page):
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a checkout")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(there), f"{target}: there is no such heading"


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a checkout")
def test_every_result_is_named_by_the_page_of_its_machine():
    for folder in (ROOT / "benchmarks" / "results").iterdir():
        linked = set(re.findall(r"\]\(([^)/]+)\)", (folder / "README.md").read_text()))
        assert {path.name for path in folder.iterdir()} - {"README.md"} <= linked


def test_the_front_page_names_every_page():
    docs = ROOT / "docs"
    front = (docs / "README.md").read_text()
    others = {page for page in docs.rglob("*.md") if page != docs / "README.md"} - WRITTEN
    linked = {(docs / target).resolve() for target in re.findall(r"\]\(([^)\s#]+)", front)}
    assert {name_of(page) for page in others - linked} == set()


@pytest.fixture
def docs_scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")


@pytest.fixture
def make_site(docs_scripts):
    import make_site

    return make_site


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a checkout")
def test_every_link_and_path_of_a_page_has_a_place_in_the_site(make_site, tmp_path):
    site = make_site.Site(tmp_path)
    for page in set(PAGES) - set((ROOT / "benchmarks").rglob("*.md")):
        site.add(page)
    site.fill()
    assert {"index.md", "repository/README.md", "repository/examples/train_bytes.py.md"} <= site.written
    assert "](repository/examples/train_bytes.py.md)" in (tmp_path / "index.md").read_text()
    assert "```python" in (tmp_path / "repository/examples/train_bytes.py.md").read_text()
    assert sum(map(len, make_site.navigation(site).values())) > 20


@pytest.mark.parametrize("text", ["[a](none.md)", "`tests/none.py`", "![a](none.svg)", "[a](../../none.md)"])
def test_the_site_refuses_a_page_that_names_what_is_not_there(text, make_site, tmp_path):
    with pytest.raises(make_site.Broken, match=r"none\.(md|py|svg)"):
        make_site.Site(tmp_path).page(ROOT / "docs" / "page.md", text)
    assert make_site.Site(tmp_path).page(ROOT / "docs" / "page.md", f"```text\n{text}\n```\n")


@pytest.mark.parametrize("items", [1, 3])
def test_the_site_refuses_a_diagram_whose_steps_are_not_those_of_its_list(items, make_site, tmp_path):
    (tmp_path / "two.svg").write_text('<svg class="drawn"><g class="step"></g><g class="step"></g></svg>')
    picture = f"![a way]({os.path.relpath(tmp_path, ROOT / 'docs')}/two.svg)\n\n"
    other = "\n\n## Another way\n\n1. An item.\n"
    with pytest.raises(make_site.Broken, match=f"has 2 steps, but the list below it has {items} items"):
        make_site.Site(tmp_path).page(ROOT / "docs" / "page.md", picture + "1. An item.\n" * items + other)
    assert make_site.Site(tmp_path).page(ROOT / "docs" / "page.md", picture + "1. An item.\n" * 2 + other)


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a checkout")
def test_figures_and_diagrams_are_those_of_the_results(docs_scripts, tmp_path):
    import make_diagrams
    import make_figures

    make_figures.main(tmp_path)
    make_diagrams.main(tmp_path / "figures")
    drawn = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.*")}
    kept = {path: (ROOT / "docs" / path).read_text() for path in drawn}
    assert drawn == kept, "run `make figures`"
    assert {path.name for path in drawn} == {"figures.md"} | {p.name for p in (ROOT / "docs" / "figures").iterdir()}


# Folders whose row in the page names every module. Rows of others say how their modules are named.
NAMED_ONE_BY_ONE = [
    "data", "data/order", "data/batches", "io", "observe", "observe/live", "checkpoint", "checkpoint/torch_zip",
    "checkpoint/background", "checkpoint/dcp", "checkpoint/safetensors", "collective", "integrations",
]  # fmt: skip


@pytest.mark.parametrize("folder", ["", *NAMED_ONE_BY_ONE])
def test_the_architecture_names_every_module(folder):
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    row = re.search(rf"^\| `{folder}/` \| .*$", page, re.MULTILINE)[0] if folder else page
    modules = {path.stem for path in (PACKAGE / folder).glob("*.py")} - {"__init__"}
    assert modules and {name for name in modules if f"`{name}`" not in row} == set()


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(EngineOptions) if one.name != "faults"])
def test_the_table_of_options_has_each_default(name):
    default = getattr(EngineOptions(), name)
    plain = f'"{default}"' if isinstance(default, str) else str(default).removesuffix(".0")
    shown = {2**20: "1 MiB", 2**14: "16 KiB"}.get(default, plain)
    page = (ROOT / "docs" / "guide" / "data-sets.md").read_text()
    assert re.search(rf"^\| `{name}` \| `?{re.escape(shown)}[`:]? ", page, re.MULTILINE)


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a checkout")
def test_pages_have_the_sizes_and_counts_that_the_engine_is_tuned_to():
    tuned = {}
    for name, value in re.findall(r"(k\w+) = (\d+(?: << \d+)?)[,;]", (ROOT / "csrc" / "tuning.h").read_text()):
        number, _, shift = value.partition(" << ")
        tuned[name] = int(number) << int(shift or 0)
    mib = {name: f"{number / 2**20:g} MiB" for name, number in tuned.items()}
    read, written = f"{tuned['kHostReadSegmentBytes'] >> 10} KiB", mib["kHostWriteSegmentBytes"]
    to_gpu, from_gpu = mib["kDeviceReadSegmentBytes"], mib["kDeviceWriteSegmentBytes"]
    bounce, least, staging = mib["kSharedBounceBytes"], mib["kLeastBounceBytes"], mib["kStagingBytes"]
    workers, of_gpu, parts = (tuned[f"kMost{one}"] for one in ("UringWorkers", "UringWorkersOfGpu", "SegmentParts"))
    descriptors = f"half of `RLIMIT_NOFILE`, up to {tuned['kMostCachedDescriptors']:,}"
    for page, words in (
        ("guide/data-sets.md", f"0 is {read}, {to_gpu} on the way to a GPU, {from_gpu} from a GPU, {written} for"),
        ("guide/data-sets.md", f"0 shares {bounce} among all workers, with at least {least} for each"),
        ("guide/data-sets.md", f"Each epoch checks {tuned['kCheckedAtOnce']} of the open files"),
        ("guide/data-sets.md", f"neighbors within {tuned['kCoalesceGapBytes'] >> 10} KiB share a request"),
        ("guide/tuning.md", f"| {read}, to a GPU {to_gpu} and from a GPU {from_gpu} "),
        ("guide/tuning.md", f"| `staging_bytes` | {staging} for each worker"),
        ("guide/tuning.md", f"share of the cores, at most {of_gpu} to a GPU; one fewer, at most {workers}, to the CPU"),
        ("guide/tuning.md", f"| `queue_depth` | {tuned['kQueueDepth']} |"),
        ("internals/architecture.md", f"segments of up to `segment_bytes` or {parts} parts"),
        ("internals/architecture.md", f"of writes they have at least {mib['kLeastSegmentBytes']}, into host memory"),
        ("internals/architecture.md", f"a read of at most {mib['kShortReadBytes']} does the work itself"),
        ("internals/scale.md", f"up to {workers}, or {of_gpu} of a GPU; {tuned['kPosixWorkers']} without io_uring"),
        ("internals/scale.md", descriptors),
    ):  # fmt: skip
        assert words in " ".join((ROOT / "docs" / page).read_text().split()), page


def test_every_question_cites_an_issue_thread():
    questions = re.split(r"^### ", (ROOT / "docs" / "faq.md").read_text(), flags=re.MULTILINE)[1:]
    thread = re.compile(r"\]\(https://github\.com/[\w-]+/[\w-]+/(?:issues|pull)/\d+\)")
    assert len(questions) > 15 and [one.splitlines()[0] for one in questions if not thread.search(one)] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


PACKAGE = Path(gdsdata.__file__).parent
FRAMEWORKS = [
    path.stem for path in sorted((PACKAGE / "integrations").glob("*.py")) if "\n__all__ = [" in path.read_text()
]
PUBLIC = ["gdsdata", "gdsdata.decoders", "gdsdata.errors", "gdsdata.formats", "gdsdata.observe.live"]
PUBLIC += ["gdsdata.safetensors", *(f"gdsdata.integrations.{one}" for one in FRAMEWORKS)]


def public_names(module):
    """Return the names in a module's `__all__`, or those it defines, without importing it."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return set(ast.literal_eval(statement.value))
    defined = {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    return {name for name in defined if not name.startswith("_")}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name_of_a_module(module, reference):
    names = {name for name in public_names(module) if f"{module}.{name}" not in PUBLIC}
    page = (reference / f"{module}.md").read_text()
    assert set(re.findall(r"^## `(\w+)`$", page, re.MULTILINE)) == names != set()


def test_the_reference_has_the_public_modules_and_no_others(reference):
    assert {path.stem for path in reference.glob("*.md")} == set(PUBLIC) and len(FRAMEWORKS) > 10


def imports_of(codes):
    """Return (module, name) of what code imports from gdsdata by name."""
    found = [one for code in codes for one in ast.walk(ast.parse(code)) if isinstance(one, ast.ImportFrom)]
    return {(one.module, name.name) for one in found if one.module.startswith("gdsdata") for name in one.names}


def test_pages_and_examples_import_only_what_is_public():
    for_formats = imports_of(code for _, code in blocks(ROOT / "docs/internals/how-to-add-a-format.md", "python"))
    pages = [page for page in PAGES if page.parent.name in ("guide", "migrate")]
    imports = imports_of(code for page in pages for _, code in blocks(page, "python"))
    imports |= imports_of(path.read_text() for path in (ROOT / "examples").rglob("*.py"))
    imports -= {("gdsdata.bench.harness", "seaweedfs")}  # a server that an example starts for itself
    public = {(m, name) for m in PUBLIC for name in public_names(m)} | {tuple(m.rsplit(".", 1)) for m in PUBLIC[1:]}
    assert len(imports & public) > 10 and imports - public - for_formats == set()
    assert [one for one in for_formats if not getattr(importlib.import_module(one[0]), one[1]).__doc__] == []


@pytest.mark.parametrize(
    "path", ["gdsdata.io.options.EngineOptions", "gdsdata.integrations.composer.Loader.batch_size"]
)
def test_a_public_name_or_property_without_a_docstring_is_refused(path, docs_scripts):
    import griffe
    import make_reference

    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser="google")
    package = loader.load("gdsdata")
    loader.resolve_aliases(implicit=False)
    modules = [package, package["integrations.composer"]]
    assert [name for module in modules for name in make_reference.undocumented(module)] == []
    package[path.removeprefix("gdsdata.")].docstring = None
    assert [name for module in modules for name in make_reference.undocumented(module)] == [path]


def test_the_reference_has_docstrings_and_every_error(reference):
    assert "Batches of samples from files, read ahead by the engine." in (reference / "gdsdata.md").read_text()
    errors = vars(gdsdata.errors)
    names = {name for name, one in errors.items() if isinstance(one, type) and one.__module__ == "gdsdata.errors"}
    assert set(re.findall(r"^## `(\w+)`$", (reference / "gdsdata.errors.md").read_text(), re.MULTILINE)) == names


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Write the pages of `make reference`, and return their folder."""
    folder = tmp_path_factory.mktemp("reference")
    subprocess.run([sys.executable, ROOT / "docs" / "make_reference.py", folder], check=True, capture_output=True)
    return folder
