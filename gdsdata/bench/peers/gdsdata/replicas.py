"""load(group=), and dcp.load with GDSLoadPlanner(read_once=): rows of case=replicas."""

import gdsdata
from gdsdata.bench.peers.gdsdata.checkpoints import Counts
from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.replicas import DcpPeer, ReplicaPeer

BY_ITSELF = "the same by each rank for itself"


class Counted(ReplicaPeer):
    """Counts what its engines read."""

    together = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.options, self.counts = gdsdata.EngineOptions(**self.engine), Counts()

    def served(self):
        return self.counts.served()


@serves("replicas")
class Load(Counted):
    key, name = "gdsdata", "gdsdata"
    setting = 'gdsdata.load(group="auto"): the ranks read once what all want'
    kinds, together = ("safetensors", "pt"), True

    def load(self):
        group = "auto" if self.together else None
        with self.counts:
            return gdsdata.load(self.source.place, self.device, group=group, options=self.options)


@serves("replicas")
class LoadAlone(Load):
    key, name = "gdsdata_alone", "gdsdata, by itself"
    setting, together = f"{BY_ITSELF}, without group=", False


@serves("replicas")
class Dcp(DcpPeer, Counted):
    key, name = "gdsdata", "gdsdata"
    setting = "torch's dcp.load with gdsdata's GDSStorageReader and GDSLoadPlanner(read_once=True)"
    together = True

    def load(self):
        reader = gdsdata.GDSStorageReader(self.source.place, options=self.options)
        with self.counts:
            return self.loaded(reader, planner=gdsdata.GDSLoadPlanner(read_once=self.together))


@serves("replicas")
class DcpAlone(Dcp):
    key, name = "gdsdata_alone", "gdsdata, by itself"
    setting, together = f"{BY_ITSELF}, with read_once=False", False
