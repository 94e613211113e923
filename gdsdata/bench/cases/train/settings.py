"""The settings of case=train, and their small values of quick=true."""

from dataclasses import dataclass

from gdsdata.bench.cases.settings import CaseSettings, setting, some_of


@dataclass
class TrainSettings(CaseSettings):
    """A training loop from files to weights: what its loader and its checkpoints cost it."""

    SMALL = {"steps": 6, "warm_up": 2, "run_seconds": 5.0, "verify_batches": 2, "images": 16}

    work: list[str] = some_of(
        ["text", "volumes", "images"],
        "text: a GPT over windows of bytes (data.seq_len); volumes: a 3-D convolutional net over npy files "
        "(data.shape); images: a 2-D one over JPEGs in WebDataset tars (torchvision is needed). With data.path= one of "
        "text (any file) and volumes",
    )
    cache: list[str] = setting(
        ["warm"],
        "page cache states before each run: warm, cold, or both; a later epoch of a cold run may be warm",
        choices=("warm", "cold"),
    )
    steps: int = setting(200, "steps that are timed in each of the `repeats` runs")
    warm_up: int = setting(10, "steps before those, in each run", may_be_0=True)
    run_seconds: float = setting(60.0, "a run ends after this many seconds, if its steps take longer; at most 240")
    step_ms: float | None = setting(
        None,
        "time of a step by itself at least, reached by going through the model's body again and again, alike in every "
        "row; a step takes one layer more than that at most, and no less than the body once. null: once",
    )
    batch_size: int | None = setting(None, "samples a batch; null: 32 windows, 16 volumes, 64 images; on the CPU 8")
    checkpoint_every: int | None = setting(
        50,
        "steps from one checkpoint of model and optimizer to the next, in rows that save; 0 or null: no such rows",
        may_be_0=True,
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
        self.batch_size, self.checkpoint_every = min(self.batch_size or 2, 2), min(self.checkpoint_every or 0, 3)
        self.image_size = [min(self.image_size[0], 64), min(self.image_size[1], 256)]
