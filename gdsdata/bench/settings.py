"""What can be set for a bench run: dataclasses that are the Hydra schema, and the text that `--help` prints from them.

A field's unit is in its name (`_bytes`, `_seconds`). Hydra refuses names that are not here and values of a wrong type;
`check` refuses values that have the right type and make no sense.
"""

import dataclasses
import inspect
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from . import device


def setting(default, help_text):
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help_text})
    return field(default=default, metadata={"help": help_text})


@dataclass
class CaseSettings:
    """What every case has."""

    name: str = setting("", "what is measured; the group sets it: case=loader, load, checkpoint, latency or io")
    rows: list[str] = setting(
        [],
        "only these rows, e.g. [gdsdata,numpy]; empty: all. package.module:Class adds one of your own (see peers.py)",
    )
    cache: list[str] = setting(
        ["warm", "cold"], "page cache states to measure; files in memory (tmpfs) have no cold one"
    )
    seed: int = setting(0, "seed of every shuffle, and of made tensors")
    repeats: int = setting(3, "runs of each row; the rows take turns (A B C A B C), the table shows medians")
    limit_seconds: float = setting(1.5, "time for each measurement of what the machine can do, over all its turns")


@dataclass
class LoaderSettings(CaseSettings):
    """GDSDataset beside what a user would write."""

    name: str = setting("loader", "what is measured; the group sets it")
    dtypes: list[str] = setting(
        ["raw", "int64"],
        "what token batches come out as: raw (the file's dtype), int64, or both; cold, the first of them only",
    )
    batch_size: int | None = setting(None, "samples a batch; null: 64 for tokens, 16 for npy")
    epochs: int = setting(5, "a warm run ends after this many epochs ...")
    run_seconds: float = setting(1.2, "... or after this many seconds from construction, whichever is first")
    cold_samples: int | None = setting(
        None, "a cold run reads this many samples, the same for every row; null: 8192 tokens, all volumes"
    )
    cold_seconds: float = setting(5.0, "a cold run is cut off after this many seconds (the report says so)")
    verify_batches: int = setting(16, "batches of every row compared with plain numpy, bit by bit, before timing")


@dataclass
class LoadSettings(CaseSettings):
    """One big file to the device."""

    name: str = setting("load", "what is measured; the group sets it")
    tensor_bytes: int = setting(64 * 2**20, "size of each bf16 tensor in the made safetensors file")


@dataclass
class CheckpointSettings(CaseSettings):
    """Save and restore of a checkpoint."""

    name: str = setting("checkpoint", "what is measured; the group sets it")
    work: list[str] = setting(
        ["save", "load", "async"],
        "save: until all is on storage; load: into tensors that are there, in each state of `cache`; async: its stall",
    )
    state_bytes: int = setting(2 * 2**30, "what is saved, in all")
    tensors: int = setting(300, "so many tensors; one in ten is of 16 KiB, the others are of equal size")
    dtypes: list[str] = setting(["bfloat16", "float32"], "of the tensors, in turn")
    overwrite: bool = setting(False, "save, once more, to a name where an older checkpoint is, which it replaces")
    written_by: str = setting(
        "gdsdata",
        "load: who wrote the files, for all rows that read the format: gdsdata, or stock (the format's own library)",
    )


@dataclass
class LatencySettings(CaseSettings):
    """One tensor, read or written again and again."""

    name: str = setting("latency", "what is measured; the group sets it")
    work: list[str] = setting(["read", "write"], "read: a file into a tensor; write: a tensor until it is on storage")
    sizes_bytes: list[int] = setting([2**12, 2**16, 2**20, 2**24, 2**27], "of the tensor: a table row for each size")
    iterations: int = setting(
        100,
        "reads or writes that are timed in each of the `repeats` runs. How they are done is set by engine.workers, "
        "engine.queue_depth, engine.segment_bytes and engine.direct (auto: page cache first; always, never: O_DIRECT)",
    )
    warm_up: int = setting(5, "iterations before those, in each run")
    run_seconds: float = setting(5.0, "a run ends after this many seconds, if iterations take longer; at most 240")
    writes: list[str] = setting(
        ["replaced", "in_place"], "replaced: a new file takes the old one's name; in_place: over the bytes of a file"
    )
    verify: bool = setting(
        False, "compare all bytes of every iteration, untimed, each time other ones; false: of two before timing"
    )


@dataclass
class IoSettings(CaseSettings):
    """Transfers of one size between a file and memory: gdsio's matrix, beside plain threads and kvikio."""

    name: str = setting("io", "what is measured; the group sets it")
    direction: list[str] = setting(
        ["read", "write", "randread", "randwrite"],
        "from the file's start on, or in random order; each transfer of it once, and again",
    )
    xfer: list[str] = setting(
        ["cpu", "cpu_gpu", "gpu"],
        "between storage and the CPU's memory, the GPU's by way of the CPU's, the GPU's straight (cuFile); without "
        "a GPU the first only. `cache` says whether reads find the file in the page cache (warm) or not (cold)",
    )
    submit: list[str] = setting(
        ["sync", "async", "batch"],
        "transfers in flight are those of `threads` threads, of one thread's futures, or of calls that carry many each",
    )
    file_bytes: int = setting(512 * 2**20, "size of the file that is read or written, and removed at the end")
    io_bytes: list[int] = setting([2**20], "size of one transfer; several: a table each, and a picture over them")
    depth: list[int] = setting([32], "transfers in flight; several: a table each, and a line each in the picture")
    threads: int | None = setting(
        None, "sync: threads, each with one transfer in flight; null: as many as depth, at most 256"
    )
    batch_calls: int = setting(
        4, "batch: calls that share the depth, so that storage has work while one returns; 1: a batch after the other"
    )
    duration_s: float | None = setting(2.0, "of each run; null: one pass over the file")
    verify: bool = setting(True, "compare what is read and, read back, what is written, untimed")


CASES = {
    "loader": LoaderSettings,
    "load": LoadSettings,
    "checkpoint": CheckpointSettings,
    "latency": LatencySettings,
    "io": IoSettings,
}


LISTS = {
    "loader": {"cache": ["warm", "cold"], "dtypes": ["raw", "int64"]},
    "load": {"cache": ["warm", "cold"]},
    "checkpoint": {
        "cache": ["warm", "cold"],
        "work": ["save", "load", "async"],
        "dtypes": ["bfloat16", "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8"],
    },
    "latency": {"cache": ["warm", "cold"], "work": ["read", "write"], "writes": ["replaced", "in_place"]},
    "io": {
        "cache": ["warm", "cold"],
        "direction": ["read", "write", "randread", "randwrite"],
        "xfer": ["cpu", "cpu_gpu", "gpu"],
        "submit": ["sync", "async", "batch"],
    },
}
MOST_DEPTH, MOST_THREADS, PAGE_BYTES = 4096, 256, 4096  # of case=io; the engine's own limit is 4096 in flight
LEAST_TENSOR_BYTES = 32 * 2**10  # on the average: some are of 16 KiB


@dataclass
class DataSettings:
    kind: str = setting("all", "case=loader: tokens, npy, or all (one after the other)")
    path: str | None = setting(
        None, "your own file, folder or glob (case=load: one safetensors file); null: it is made once and kept"
    )
    folder: str | None = setting(
        None, "where made data is kept; null: $XDG_CACHE_HOME or ~/.cache, gdsdata/bench. In /dev/shm it is never cold"
    )
    size_bytes: int = setting(512 * 2**20, "size of a made data set")
    dtype: str = setting("uint16", "tokens: dtype of the file")
    seq_len: int = setting(1024, "tokens: a sample is seq_len + 1 tokens")
    stride: int | None = setting(None, "tokens: from one sample's start to the next; null: seq_len")
    shape: list[int] = setting([128, 64, 64], "npy: shape of a made volume (float32); your own files say theirs")


@dataclass
class DeviceSettings:
    name: str = setting("cpu", "where batches and tensors are delivered: cpu, cuda or cuda:N")


@dataclass
class Settings:
    case: CaseSettings = field(default_factory=CaseSettings)
    data: DataSettings = field(default_factory=DataSettings)
    engine: Any = None
    device: DeviceSettings = field(default_factory=DeviceSettings)
    quick: bool = setting(False, "everything small (16 MiB, short runs): shows that it works, its figures mean little")

    def as_dict(self):
        return dataclasses.asdict(self)


def made_small(settings):
    """What quick=true stands for. Values that were made smaller by hand stay as they are."""
    case, data = settings.case, settings.data
    case.repeats, case.limit_seconds = min(case.repeats, 1), min(case.limit_seconds, 0.2)
    if case.name == "loader":
        case.epochs, case.verify_batches = min(case.epochs, 2), min(case.verify_batches, 4)
        case.run_seconds, case.cold_seconds = min(case.run_seconds, 0.2), min(case.cold_seconds, 0.5)
        case.cold_samples = min(case.cold_samples or 1024, 1024)
    elif case.name == "load":
        case.tensor_bytes = min(case.tensor_bytes, 4 * 2**20)
    elif case.name == "latency":
        case.iterations, case.run_seconds = min(case.iterations, 20), min(case.run_seconds, 0.5)
        case.sizes_bytes = [size for size in case.sizes_bytes if size <= 2**20] or [2**20]
    elif case.name == "io":
        case.file_bytes = min(case.file_bytes, max(16 * 2**20, *case.io_bytes))
        case.duration_s = min(case.duration_s or 0.1, 0.1)
    else:
        case.state_bytes = min(case.state_bytes, 64 * 2**20)
    data.size_bytes = min(data.size_bytes, 16 * 2**20)
    return settings


def check(settings):
    """Raises ValueError with the field's full name, what it was and what it may be."""
    case, data = settings.case, settings.data

    def one_of(name, value, choices):
        if value not in choices:
            raise ValueError(f"{name}={value}: use {' or '.join(choices)}")

    one_of("case.name", case.name, list(CASES))
    if not isinstance(case, CASES[case.name]):
        raise ValueError(f"case.name={case.name}: choose a case by its group, case={case.name}")
    one_of("data.kind", data.kind, ["all", "tokens", "npy"])
    if not device.valid_name(settings.device.name):
        raise ValueError(f"device.name={settings.device.name}: use cpu, cuda or cuda:N (N is a number)")
    for name, choices in LISTS[case.name].items():
        values = getattr(case, name)
        if not values:
            raise ValueError(f"case.{name}=[]: name at least one of {', '.join(choices)}")
        for value in values:
            one_of(f"case.{name}", value, choices)
    one_of("data.dtype", data.dtype, ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"])
    if not data.shape or any(side < 1 for side in data.shape):
        raise ValueError(f"data.shape={list(data.shape)}: every side must be 1 or more")
    for group, part in (("case", case), ("data", data)):
        for item in dataclasses.fields(part):
            value = getattr(part, item.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if item.name != "seed" and number and value <= 0:
                raise ValueError(f"{group}.{item.name}={value}: must be more than 0")
    if case.name == "load" and case.tensor_bytes % 2:
        raise ValueError(f"case.tensor_bytes={case.tensor_bytes}: must be even, an element has 2 bytes")
    if case.name == "checkpoint":
        check_checkpoint(case, data)
    if case.name == "latency":
        check_latency(case, data)
    if case.name == "io":
        check_io(case, data)
    device.check(settings.device.name)
    return settings


def check_checkpoint(case, data):
    if case.written_by not in ("gdsdata", "stock"):
        raise ValueError(f"case.written_by={case.written_by}: use gdsdata or stock")
    if case.state_bytes < case.tensors * LEAST_TENSOR_BYTES:
        raise ValueError(
            f"case.state_bytes={case.state_bytes}: too few for case.tensors={case.tensors}, which take "
            f"{case.tensors * LEAST_TENSOR_BYTES} or more"
        )
    if data.path:
        raise ValueError(f"data.path={data.path}: case=checkpoint makes what it saves; data.folder= says where")


def check_latency(case, data):
    if not case.sizes_bytes or min(case.sizes_bytes) < 1:
        raise ValueError(f"case.sizes_bytes={list(case.sizes_bytes)}: name one size at least, of 1 byte or more")
    if case.run_seconds > 240:
        raise ValueError(f"case.run_seconds={case.run_seconds}: at most 240; repeats= takes more runs")
    if data.path:
        raise ValueError(f"data.path={data.path}: case=latency makes its files; data.folder= says where")


def check_io(case, data):
    for name in ("io_bytes", "depth"):
        values = getattr(case, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"case.{name}={values}: name at least one, and none twice")
    for name, most in (("depth", MOST_DEPTH), ("threads", MOST_THREADS), ("batch_calls", MOST_THREADS)):
        values = getattr(case, name)
        for value in values if isinstance(values, list) else [values or 1]:
            if not 1 <= value <= most:
                raise ValueError(f"case.{name}={value}: must be from 1 to {most}")
    for name, size in (*(("io_bytes", size) for size in case.io_bytes), ("file_bytes", case.file_bytes)):
        if size < PAGE_BYTES or size % PAGE_BYTES:
            raise ValueError(f"case.{name}={size}: must be a multiple of {PAGE_BYTES}, as O_DIRECT wants it")
    if max(case.io_bytes) > case.file_bytes:
        raise ValueError(f"case.io_bytes={max(case.io_bytes)}: more than case.file_bytes={case.file_bytes}")
    if data.path:
        raise ValueError(f"data.path={data.path}: case=io makes the file that it reads; data.folder= says where")


def settings_from(config):
    """Dataclasses from Hydra's configuration (an OmegaConf DictConfig), checked."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(config, resolve=True)
    settings = Settings(
        case=OmegaConf.get_type(config.case)(**plain["case"]),
        data=DataSettings(**plain["data"]),
        engine=plain.get("engine") or {},
        device=DeviceSettings(**plain["device"]),
        quick=plain["quick"],
    )
    check(settings)
    return made_small(settings) if settings.quick else settings


def engine_schema():
    """gdsdata's own EngineOptions, so that `engine.*` overrides are checked against them; here they can be set."""
    from gdsdata.options import EngineOptions

    helps = documented(EngineOptions)
    hints = get_type_hints(EngineOptions)
    fields = [
        (item.name, hints[item.name], setting(item.default, helps.get(item.name, "")))
        for item in dataclasses.fields(EngineOptions)
    ]
    return dataclasses.make_dataclass("EngineOptions", fields)


def documented(cls):
    """{name: text} from the "Attributes:" part of a docstring in Google's style."""
    found, name = {}, None
    for line in (inspect.getdoc(cls) or "").partition("Attributes:")[2].splitlines():
        start = re.fullmatch(r"    (\w+): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif name and line.startswith("        "):
            found[name] += " " + line.strip()
        elif line.strip():
            break
    return {name: text.replace("``", "").rstrip(".") for name, text in found.items()}


def help_text():
    common = [item.name for item in dataclasses.fields(CaseSettings)]
    of_every_case = dict.fromkeys(CASES.values(), common) | {CaseSettings: ["name"]}

    def lines(group, cls):
        for item in dataclasses.fields(cls):
            if dataclasses.is_dataclass(item.type) or item.name in ("engine", *of_every_case.get(cls, ())):
                continue
            default = item.default if item.default is not dataclasses.MISSING else item.default_factory()
            if isinstance(default, list):
                default = f"[{','.join(map(str, default))}]"
            elif default is None or isinstance(default, bool):
                default = "null" if default is None else str(default).lower()
            name = f"{group}.{item.name}" if group else item.name
            note = item.metadata.get("help", "")
            yield from textwrap.wrap(f"  {name + '=' + str(default):<33} {note}", 118, subsequent_indent=" " * 36)

    parts = [
        "python -m gdsdata.bench [name=value ...]",
        "",
        "Measures gdsdata beside the libraries and the best hand-written code for the same work, on the same files,",
        "and beside what this machine can do at most. Writes report.md, report.html, results.json and results.png to",
        "a folder of its own (hydra.run.dir=) and prints the tables.",
        "",
        "  case=loader | load | checkpoint    shuffled batches; one big file into tensors; saving and loading a state",
        "       latency                       (default: loader); one tensor, read and written again and again",
        "  case=io                            transfers of one size, by type, direction and depth (default: loader)",
        "  data=tokens | npy | all            case=loader: which data set (default: all)",
        "  device=cpu | cuda                  where to (default: cpu)",
        "  engine=auto | posix | uring        how gdsdata's engine reads (default: auto, what a user gets)",
        "  data.path=~/corpus/train.bin       your own data",
        "  quick=true                         all of it small, in seconds",
        "",
    ]
    for title, group, cls in (
        ("General", "", Settings),
        ("case, every case", "case", CaseSettings),
        *((f"case={name}", "case", cls) for name, cls in CASES.items()),
        ("data", "data", DataSettings),
        ("engine (gdsdata.EngineOptions)", "engine", engine_schema()),
        ("device", "device", DeviceSettings),
    ):
        parts += [title, *lines(group, cls), ""]
    return "\n".join(parts).replace("$", "$$")  # Hydra takes it for a string.Template


def configs_folder():
    """The Hydra tree. In a checkout it is a link to configs/."""
    folder = Path(__file__).resolve().parents[1] / "configs"
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"no config.yaml in {folder}: this gdsdata is incomplete; install it again")
    return folder
