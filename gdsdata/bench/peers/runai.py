"""RunAI's model streamer: rows of case=replicas."""

import os

from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.replicas import ReplicaPeer


@serves("replicas")
class Together(ReplicaPeer):
    key, name = "runai_group", "RunAI streamer, distributed"
    setting = (
        "runai_model_streamer's SafetensorsStreamer.stream_file(device=, is_distributed=True), every tensor; over gloo "
        "by RUNAI_STREAMER_DIST=1"
    )
    package, kinds, devices = "runai_model_streamer", ("safetensors",), ("cpu", "cuda")
    path, together = "read", True

    def load(self):
        from runai_model_streamer import SafetensorsStreamer

        os.environ["RUNAI_STREAMER_DIST"] = "1"  # else gloo is not used
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.source.path, device=self.device, is_distributed=self.together)
            return dict(streamer.get_tensors())


@serves("replicas")
class Alone(Together):
    key, name = "runai", "RunAI streamer"
    setting = "the same with is_distributed=False; each rank by itself"
    together = False
