"""The folder of a run's report. Hydra makes it, because it writes the run's settings there."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

LOG = "rows.log"  # of a case's rows: empty if none has begun


class OutputFolder(Callback):
    """Makes the folder before Hydra does, because Hydra reports a failure as a traceback."""

    def on_run_start(self, config: Any, **more: Any) -> None:
        folder = OmegaConf.select(config, "hydra.run.dir")
        try:
            (Path(folder) / (config.hydra.output_subdir or "")).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "give a folder that can be made or written"
            print(f"gdsdata.bench: hydra.run.dir={folder}: {error}: {remedy}", file=sys.stderr)
            sys.exit(2)


@contextlib.contextmanager
def removed_if_nothing_was_measured(folder: Path, settings_folder: str | None) -> Iterator[None]:
    """Remove the folder at the end if it has no more than the run's settings and an empty log."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            log, others = folder / LOG, {path.name for path in folder.iterdir()} - {LOG, settings_folder}
            if not others and not (log.exists() and log.stat().st_size):
                log.unlink(missing_ok=True)
                if settings_folder:
                    shutil.rmtree(folder / settings_folder)
                if folder != Path.cwd():
                    folder.rmdir()
