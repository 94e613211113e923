"""The cases, a folder each: `settings`, `case` (the bench's side), `row` (the row's process),
`report` and notes.md.
"""

import pkgutil

from gdsdata.bench.cases.all.settings import AllSettings
from gdsdata.bench.cases.checkpoint.settings import CheckpointSettings
from gdsdata.bench.cases.io.settings import IoSettings
from gdsdata.bench.cases.latency.settings import LatencySettings
from gdsdata.bench.cases.load.settings import LoadSettings
from gdsdata.bench.cases.loader.settings import LoaderSettings
from gdsdata.bench.cases.remote.settings import RemoteSettings
from gdsdata.bench.cases.replicas.settings import ReplicasSettings
from gdsdata.bench.cases.settings import CaseSettings
from gdsdata.bench.cases.startup.settings import StartupSettings
from gdsdata.bench.cases.tensor.settings import TensorSettings
from gdsdata.bench.cases.train.settings import TrainSettings
from gdsdata.bench.cases.tune.settings import TuneSettings

# In the order of case=all and --help.
SINGLE: tuple[type[CaseSettings], ...] = (
    LoaderSettings, LoadSettings, CheckpointSettings, ReplicasSettings, LatencySettings, TensorSettings, IoSettings,
    TrainSettings, StartupSettings, RemoteSettings, TuneSettings,
)  # fmt: skip
AllSettings.SINGLE = {cls().name: cls for cls in SINGLE}
SETTINGS: dict[str, type[CaseSettings]] = {**AllSettings.SINGLE, "all": AllSettings}


def case_class(name):
    return pkgutil.resolve_name(f"{__name__}.{name}.case:{name.capitalize()}")


def layout_of(results):
    """The layout of a case's tables, notes and picture, for these results."""
    name = results["case"]
    return pkgutil.resolve_name(f"{__name__}.{name}.report:{name.capitalize()}Layout")(results)
