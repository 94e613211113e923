"""The settings of a run: the dataclasses of Hydra's schema, and `--help`.

A field's unit is in its name (`_bytes`, `_seconds`). Hydra refuses unknown names and values of a
wrong type; `check` refuses values that have the right type and make no sense.
"""

import dataclasses
import inspect
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from gdsdata.bench.cases import SETTINGS as CASES
from gdsdata.bench.cases.settings import CaseSettings, check_field, one_of, setting
from gdsdata.bench.measure import device


@dataclass
class DataSettings:
    kind: str = setting(
        "all", "case=loader: tokens, npy, or all (one after the other)", choices=("all", "tokens", "npy")
    )
    path: str | None = setting(
        None, "your own file, folder or glob (case=load: one safetensors file); null: it is made once and kept"
    )
    folder: str | None = setting(
        None, "where made data is kept; null: $XDG_CACHE_HOME or ~/.cache, gdsdata/bench. In /dev/shm it is never cold"
    )
    size_bytes: int = setting(512 * 2**20, "size of a made data set")
    files: list[int] = setting(
        [1],
        "case=loader, tokens: so many files share a made data set; each number is a data set of its own",
        within=(1, 2**16),
        distinct=True,
    )
    dtype: str = setting(
        "uint16",
        "tokens: dtype of your own file; made ones are uint16",
        choices=("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"),
    )
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
    """Apply quick=true. Values that were made smaller by hand stay."""
    settings.case.make_small()
    settings.data.size_bytes = min(settings.data.size_bytes, 16 * 2**20)
    return settings


def check(settings):
    """Raise ValueError with the setting's full name, its value and what it may be."""
    from gdsdata.io.options import EngineOptions

    case, data = settings.case, settings.data
    one_of("case.name", case.name, list(CASES))
    if not isinstance(case, CASES[case.name]):
        raise ValueError(f"case.name={case.name}: choose a case by its group, case={case.name}")
    for item in dataclasses.fields(data):
        check_field(f"data.{item.name}", getattr(data, item.name), item.metadata)
    if not data.shape or any(side < 1 for side in data.shape):
        raise ValueError(f"data.shape={list(data.shape)}: every side must be 1 or more")
    case.check_all(data)
    if data.dtype != "uint16" and not data.path:
        raise ValueError(f"data.dtype={data.dtype}: made tokens are uint16; it is for your own file, data.path=")
    device.check(settings.device.name)
    options = EngineOptions(**settings.engine or {})  # refuses numbers that are negative
    one_of("engine.backend", options.backend, ["auto", "uring", "posix", "cufile"])
    one_of("engine.direct", options.direct, ["auto", "always", "never"])
    return settings


def settings_from(config):
    """Return dataclasses of Hydra's configuration (an OmegaConf DictConfig), checked."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config, resolve=True)
    case_settings: Any = OmegaConf.get_type(config.case)
    settings = Settings(
        case=case_settings(**plain["case"]),
        data=DataSettings(**plain["data"]),
        engine=plain.get("engine") or {},
        device=DeviceSettings(**plain["device"]),
        quick=plain["quick"],
    )
    check(settings)
    return made_small(settings) if settings.quick else settings


def engine_schema():
    """Return EngineOptions with fields that can be set: `engine.*` is checked by it."""
    from gdsdata.io.options import EngineOptions

    helps, hints = documented(EngineOptions), get_type_hints(EngineOptions)
    fields = [
        (item.name, hints[item.name], setting(item.default, helps.get(item.name, "")))
        for item in dataclasses.fields(EngineOptions)
    ]
    return dataclasses.make_dataclass("EngineOptions", fields)


def documented(cls):
    """Return {name: text} of the "Attributes:" of a docstring in Google's style."""
    _, _, behind = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    attributes = re.split(r"^\S", behind, maxsplit=1, flags=re.MULTILINE)[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "").rstrip(".") for name, text in entries}


def help_text():
    def lines(group, cls):
        defaults = cls()
        for item in dataclasses.fields(cls):
            # A case shows its own settings, and common ones with another default.
            hidden = item.name not in cls.__annotations__ or (group, item.name) == ("case", "name")
            if hidden or item.name == "engine" or dataclasses.is_dataclass(item.type):
                continue
            default = getattr(defaults, item.name)
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
        *(f"  {f'case={name}':<34} {(inspect.getdoc(cls) or '').splitlines()[0]}" for name, cls in CASES.items()),
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
    """Return the Hydra tree. In a checkout it is a link to configs/."""
    folder = Path(__file__).resolve().parents[1] / "configs"
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"no config.yaml in {folder}: this gdsdata is incomplete; install it again")
    return folder
