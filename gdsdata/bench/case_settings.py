"""What can be set for each case of the bench: one dataclass a case, with its defaults, choices and what is small.

See settings.py, which has the rest.
"""

from dataclasses import dataclass, field, fields
from typing import ClassVar

MOST_DEPTH, MOST_THREADS, PAGE_BYTES = 4096, 256, 4096  # of case=io; the engine's own limit is 4096 in flight
LEAST_TENSOR_BYTES = 32 * 2**10  # on the average: some are of 16 KiB
LEAST_PAIRS = 6  # of turns, in which case=tune confirms what it found


def setting(default, help_text):
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help_text})
    return field(default=default, metadata={"help": help_text})


def one_of(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}={value}: use {' or '.join(choices)}")


@dataclass
class CaseSettings:
    """What every case has."""

    CHOICES: ClassVar = {"cache": ["warm", "cold"]}  # what the values of a list may be
    MAY_BE_0: ClassVar = ("warm_up",)  # of the numbers, which are else more than 0

    name: str = setting("", "what is measured; the group sets it (default: case=loader)")
    rows: list[str] = setting(
        [],
        "only these rows, e.g. [gdsdata,numpy]; empty: all. package.module:Class adds one of your own (see peers.py)",
    )
    cache: list[str] = setting(
        ["warm", "cold"], "page cache states to measure; files in memory (tmpfs) have no cold one"
    )
    seed: int = setting(0, "seed of every shuffle, and of made tensors")
    repeats: int = setting(3, "runs of each row; the rows take turns (A B C A B C), the table shows medians")
    limit_seconds: float = setting(1.5, "time for each limit, over all its turns; not where whole files are moved")

    def check(self, data):
        """Raises ValueError for values that make no sense together. Each number is more than 0 already."""

    def make_small(self):
        """What quick=true stands for. A value that is smaller already stays as it is."""
        self.repeats, self.limit_seconds = min(self.repeats, 1), min(self.limit_seconds, 0.2)


@dataclass
class LoaderSettings(CaseSettings):
    """Shuffled batches: GDSDataset beside what a user would write."""

    CHOICES: ClassVar = CaseSettings.CHOICES | {"dtypes": ["raw", "int64"]}

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

    def make_small(self):
        super().make_small()
        self.epochs, self.verify_batches = min(self.epochs, 2), min(self.verify_batches, 4)
        self.run_seconds, self.cold_seconds = min(self.run_seconds, 0.2), min(self.cold_seconds, 0.5)
        self.cold_samples = min(self.cold_samples or 1024, 1024)


@dataclass
class LoadSettings(CaseSettings):
    """One big file into tensors."""

    name: str = setting("load", "what is measured; the group sets it")
    tensor_bytes: int = setting(64 * 2**20, "size of each bf16 tensor in the made safetensors file")

    def check(self, data):
        if self.tensor_bytes % 2:
            raise ValueError(f"case.tensor_bytes={self.tensor_bytes}: must be even, an element has 2 bytes")

    def make_small(self):
        super().make_small()
        self.tensor_bytes = min(self.tensor_bytes, 4 * 2**20)


@dataclass
class CheckpointSettings(CaseSettings):
    """Saving and loading a checkpoint of many tensors."""

    CHOICES: ClassVar = CaseSettings.CHOICES | {
        "work": ["save", "load", "async"],
        "dtypes": ["bfloat16", "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8"],
    }

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

    def check(self, data):
        if self.written_by not in ("gdsdata", "stock"):
            raise ValueError(f"case.written_by={self.written_by}: use gdsdata or stock")
        if self.state_bytes < self.tensors * LEAST_TENSOR_BYTES:
            raise ValueError(
                f"case.state_bytes={self.state_bytes}: too few for case.tensors={self.tensors}, which take "
                f"{self.tensors * LEAST_TENSOR_BYTES} or more"
            )
        if data.path:
            raise ValueError(f"data.path={data.path}: case=checkpoint makes what it saves; data.folder= says where")

    def make_small(self):
        super().make_small()
        self.state_bytes = min(self.state_bytes, 64 * 2**20)


@dataclass
class LatencySettings(CaseSettings):
    """One tensor, read or written again and again, by size."""

    CHOICES: ClassVar = CaseSettings.CHOICES | {"work": ["read", "write"], "writes": ["replaced", "in_place"]}

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

    def check(self, data):
        if not self.sizes_bytes or min(self.sizes_bytes) < 1:
            raise ValueError(f"case.sizes_bytes={list(self.sizes_bytes)}: name one size at least, of 1 byte or more")
        if self.run_seconds > 240:
            raise ValueError(f"case.run_seconds={self.run_seconds}: at most 240; repeats= takes more runs")
        if data.path:
            raise ValueError(f"data.path={data.path}: case=latency makes its files; data.folder= says where")

    def make_small(self):
        super().make_small()
        self.iterations, self.run_seconds = min(self.iterations, 20), min(self.run_seconds, 0.5)
        self.sizes_bytes = [size for size in self.sizes_bytes if size <= 2**20] or [2**20]


@dataclass
class TensorSettings(CaseSettings):
    """One big tensor, on the CPU and on a GPU, loaded from a file and stored: DeepNVMe's table."""

    CHOICES: ClassVar = CaseSettings.CHOICES | {"work": ["load", "store"], "writes": ["replaced", "in_place"]}

    name: str = setting("tensor", "what is measured; the group sets it")
    work: list[str] = setting(["load", "store"], "load: a file into a tensor; store: a tensor until it is on storage")
    size_bytes: int = setting(2**30, "of the tensor, a multiple of 1 MiB; it takes six times as much memory")
    loop: int = setting(3, "loads or stores that are timed in each of the `repeats` runs, behind one that is not")
    writes: list[str] = setting(
        ["replaced", "in_place"],
        "of a store. replaced: a new file takes the old one's name; in_place: over the bytes of a file",
    )
    validate: bool = setting(
        False, "compare all bytes of every timed load and store too, each time other ones; false: of two before timing"
    )

    def check(self, data):
        if self.size_bytes % 2**20:
            raise ValueError(f"case.size_bytes={self.size_bytes}: must be a multiple of 1 MiB, as every row takes it")
        if data.path:
            raise ValueError(f"data.path={data.path}: case=tensor makes its files; data.folder= says where")

    def make_small(self):
        super().make_small()
        self.size_bytes, self.loop = min(self.size_bytes, 16 * 2**20), min(self.loop, 2)


@dataclass
class IoSettings(CaseSettings):
    """Transfers of one size between a file and memory: gdsio's matrix."""

    CHOICES: ClassVar = CaseSettings.CHOICES | {
        "direction": ["read", "write", "randread", "randwrite"],
        "xfer": ["cpu", "cpu_gpu", "gpu"],
        "submit": ["sync", "async", "batch"],
    }

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

    def check(self, data):
        for name in ("io_bytes", "depth"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"case.{name}={values}: name at least one, and none twice")
        for name, most in (("depth", MOST_DEPTH), ("threads", MOST_THREADS), ("batch_calls", MOST_THREADS)):
            values = getattr(self, name)
            for value in values if isinstance(values, list) else [values or 1]:
                if not 1 <= value <= most:
                    raise ValueError(f"case.{name}={value}: must be from 1 to {most}")
        for name, size in (*(("io_bytes", size) for size in self.io_bytes), ("file_bytes", self.file_bytes)):
            if size < PAGE_BYTES or size % PAGE_BYTES:
                raise ValueError(f"case.{name}={size}: must be a multiple of {PAGE_BYTES}, as O_DIRECT wants it")
        if max(self.io_bytes) > self.file_bytes:
            raise ValueError(f"case.io_bytes={max(self.io_bytes)}: more than case.file_bytes={self.file_bytes}")
        if data.path:
            raise ValueError(f"data.path={data.path}: case=io makes the file that it reads; data.folder= says where")

    def make_small(self):
        super().make_small()
        self.file_bytes = min(self.file_bytes, max(16 * 2**20, *self.io_bytes))
        self.duration_s = min(self.duration_s or 0.1, 0.1)


@dataclass
class TrainSettings(CaseSettings):
    """A training loop from files to weights: what its loader and its checkpoints cost it."""

    CHOICES: ClassVar = CaseSettings.CHOICES | {"work": ["text", "volumes", "images"]}
    MAY_BE_0: ClassVar = (*CaseSettings.MAY_BE_0, "checkpoint_every")

    name: str = setting("train", "what is measured; the group sets it")
    work: list[str] = setting(
        ["text", "volumes", "images"],
        "text: a GPT over windows of bytes (data.seq_len); volumes: a 3-D convolutional net over npy files "
        "(data.shape); images: a 2-D one over JPEGs in WebDataset tars (torchvision is needed). With data.path= one of "
        "text (any file) and volumes",
    )
    cache: list[str] = setting(
        ["warm"], "page cache states before each run: warm, cold, or both; a later epoch of a cold run may be warm"
    )
    steps: int = setting(200, "steps that are timed in each of the `repeats` runs")
    warm_up: int = setting(10, "steps before those, in each run")
    run_seconds: float = setting(60.0, "a run ends after this many seconds, if its steps take longer; at most 240")
    step_ms: float | None = setting(
        None,
        "time of a step by itself at least, reached by going through the model's body again and again, alike in every "
        "row; a step takes one layer more than that at most, and no less than the body once. null: once",
    )
    batch_size: int | None = setting(None, "samples a batch; null: 32 windows, 16 volumes, 64 images; on the CPU 8")
    checkpoint_every: int | None = setting(
        50, "steps from one checkpoint of model and optimizer to the next, in rows that save; 0 or null: no such rows"
    )
    images: int = setting(1024, "images that are made")
    image_size: list[int] = setting([384, 512], "their height and width in pixels, of 16 and 256 at least")
    verify_batches: int = setting(4, "batches of each of two epochs compared with plain reading, before timing")

    def check(self, data):
        if self.run_seconds > 240:
            raise ValueError(f"case.run_seconds={self.run_seconds}: at most 240; repeats= takes more runs")
        if self.checkpoint_every and self.checkpoint_every > self.steps:
            raise ValueError(
                f"case.checkpoint_every={self.checkpoint_every}: no checkpoint within case.steps={self.steps}; "
                "0 leaves the rows that save out"
            )
        if len(self.image_size) != 2 or self.image_size[0] < 16 or self.image_size[1] < 256:
            raise ValueError(f"case.image_size={list(self.image_size)}: [height,width], of 16 and 256 or more")
        if self.images > 2**16:
            raise ValueError(f"case.images={self.images}: at most {2**16}, for an image's number has 16 bits")
        if "images" in self.work and self.images < (self.batch_size or 1):
            raise ValueError(f"case.images={self.images}: fewer than case.batch_size={self.batch_size}")
        if data.path and (len(self.work) > 1 or "images" in self.work):
            raise ValueError(f"data.path={data.path}: say whose it is, case.work=[text] or case.work=[volumes]")

    def make_small(self):
        super().make_small()
        self.steps, self.warm_up = min(self.steps, 6), min(self.warm_up, 2)
        self.run_seconds, self.verify_batches = min(self.run_seconds, 5.0), min(self.verify_batches, 2)
        self.batch_size, self.images = min(self.batch_size or 2, 2), min(self.images, 16)
        self.image_size = [min(self.image_size[0], 64), min(self.image_size[1], 256)]
        self.checkpoint_every = min(self.checkpoint_every or 0, 3)


@dataclass
class TuneSettings(CaseSettings):
    """The best engine.* for a path and device, and what it gains over the default."""

    CHOICES: ClassVar = CaseSettings.CHOICES | {"work": ["read", "batches", "write"]}

    name: str = setting("tune", "what is measured; the group sets it")
    cache: list[str] = setting(["cold"], "page cache states; each is a search of its own")
    repeats: int = setting(30, "pairs of turns, at most, in which what was found is compared with the default")
    work: list[str] = setting(
        ["read"],
        "what to tune for: read, big reads into a tensor (any files); batches, shuffled ones of GDSDataset (tokens, "
        "npy); write, a tensor until it is on storage, beside data.path. Each is a search of its own",
    )
    budget_s: float = setting(60.0, "time for all searches, data not counted; what is not tried by then, a note says")
    run_seconds: float = setting(0.4, "of one turn of one setting; cold, it ends with the files")
    tensor_bytes: int = setting(64 * 2**20, "read, write: of the tensor, and so of one call")
    batch_size: int | None = setting(None, "batches: samples; null: 64 for tokens, 16 for npy")
    workers: list[int] = setting([1, 2, 4, 8, 16], "values of engine.workers to try; an empty list leaves it out")
    queue_depth: list[int] = setting([8, 16, 32, 128, 256], "the same of engine.queue_depth; not where all is warm")
    segment_bytes: list[int] = setting([2**20, 2**21, 2**22, 2**23, 2**24], "the same of engine.segment_bytes")
    direct: list[str] = setting(["auto", "always", "never"], "the same of engine.direct")
    request_bytes: list[int] = setting([], "the same of engine.request_bytes, e.g. [262144,4194304]")
    bounce_bytes: list[int] = setting([], "the same of engine.bounce_bytes, e.g. [67108864]")

    def check(self, data):
        for value in self.direct:
            one_of("case.direct", value, ["auto", "always", "never"])
        for name in ("workers", "queue_depth", "segment_bytes", "request_bytes", "bounce_bytes"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"case.{name}={getattr(self, name)}: each must be 1 or more; [] leaves it out")
        if self.repeats < LEAST_PAIRS:
            raise ValueError(f"case.repeats={self.repeats}: fewer than {LEAST_PAIRS} pairs confirm nothing")
        if self.tensor_bytes < PAGE_BYTES:
            raise ValueError(f"case.tensor_bytes={self.tensor_bytes}: must be {PAGE_BYTES} or more")
        if self.rows:
            raise ValueError(
                f"case.rows={self.rows}: case=tune has no rows to choose; case.work= says what to tune for"
            )

    def make_small(self):
        repeats = self.repeats  # fewer would confirm nothing
        super().make_small()
        self.repeats, self.budget_s = min(repeats, 6), min(self.budget_s, 8.0)
        self.run_seconds, self.tensor_bytes = min(self.run_seconds, 0.05), min(self.tensor_bytes, 4 * 2**20)
        for name in ("workers", "queue_depth", "segment_bytes"):
            setattr(self, name, getattr(self, name)[:2])


@dataclass
class AllSettings(CaseSettings):
    """Every other case, one after the other, and one page of them all."""

    name: str = setting("all", "what is measured; the group sets it")
    cases: list[str] = setting([], "only these cases, e.g. [loader,io], in this order; empty: all there are")
    settings: list[str] = setting(
        [],
        "of one case each, e.g. [io.file_bytes=1073741824,loader.epochs=2]. `cache`, `seed`, `repeats` and "
        "`limit_seconds` here, data.*, engine.* and device are given to every case where they are not the defaults",
    )

    def check(self, data):
        for name in self.cases:
            one_of("case.cases", name, single_cases())
        for one in self.settings:
            name, _, rest = one.partition(".")
            one_of(f"case.settings: {one}: its case", name, single_cases())
            if rest.partition("=")[0] not in {item.name for item in fields(CASES[name])} or "=" not in rest:
                raise ValueError(f"case.settings: {one}: case={name} has no such setting; write {name}.NAME=VALUE")
        if self.rows:
            raise ValueError(f"case.rows={self.rows}: say whose: case.settings=[loader.rows=...]")
        if data.path:
            raise ValueError(f"data.path={data.path}: case=all makes its data; data.folder= says where")

    def make_small(self):
        """Each case does so by itself."""


@dataclass
class StartupSettings(CaseSettings):
    """From a training script's start to its first step, by part."""

    name: str = setting("startup", "what is measured; the group sets it")
    state_bytes: list[int] = setting(
        [0, 2**30], "size of the checkpoint that is restored, tables for each; 0: none. torch.save's, and safetensors'"
    )
    batch_size: int = setting(64, "samples of data.seq_len + 1 tokens in the first batch")
    workers: list[int] = setting(
        [0, 1, 2, 4], "DataLoaders with so many worker processes each, a row for each; the notes name the best"
    )
    warm_up: int = setting(1, "runs of each row before those that are timed; quick=true: none")

    def check(self, data):
        for name, least, most in (("state_bytes", 0, 2**50), ("workers", 0, MOST_THREADS)):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"case.{name}={values}: name at least one, and none twice")
            for value in values:
                if not least <= value <= most:
                    raise ValueError(f"case.{name}={value}: must be from {least} to {most}")
        if data.dtype != "uint16":
            raise ValueError(f"data.dtype={data.dtype}: case=startup reads tokens of uint16")
        if data.stride not in (None, data.seq_len):
            raise ValueError(f"data.stride={data.stride}: case=startup takes windows of seq_len, one behind the other")
        if data.path:
            raise ValueError(f"data.path={data.path}: case=startup makes what it reads; data.folder= says where")
        if data.size_bytes < 2 * (data.seq_len + 1) * self.batch_size:
            raise ValueError(
                f"data.size_bytes={data.size_bytes}: too few for a batch of case.batch_size={self.batch_size} windows "
                f"of {data.seq_len + 1} tokens"
            )

    def make_small(self):
        super().make_small()
        self.state_bytes = [size for size in self.state_bytes if 0 < size <= 2**24][:1] or [2**24]
        self.cache, self.workers, self.warm_up = self.cache[:1], self.workers[:2], 0


CASES = {
    "loader": LoaderSettings,
    "load": LoadSettings,
    "checkpoint": CheckpointSettings,
    "latency": LatencySettings,
    "tensor": TensorSettings,
    "io": IoSettings,
    "train": TrainSettings,
    "startup": StartupSettings,
    "tune": TuneSettings,
    "all": AllSettings,
}


def single_cases():
    return [name for name in CASES if name != "all"]
