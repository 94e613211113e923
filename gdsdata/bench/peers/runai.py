"""RunAI's model streamer: rows of case=replicas."""

from gdsdata.bench.peers.registry import serves
from gdsdata.bench.peers.replicas import ReplicaPeer


@serves("replicas")
class Together(ReplicaPeer):
    key, name = "runai_group", "RunAI streamer, distributed"
    setting = "runai_model_streamer's SafetensorsStreamer.stream_file(device=, is_distributed=True), every tensor"
    package, kinds = "runai_model_streamer", ("safetensors",)
    devices: tuple[str, ...] = ("cuda",)
    path, together = "read", True

    def load(self):
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.source.path, device=self.device, is_distributed=self.together)
            return dict(streamer.get_tensors())


@serves("replicas")
class Alone(Together):
    key, name = "runai", "RunAI streamer"
    setting = "the same with is_distributed=False; each rank by itself"
    devices, together = ("cpu", "cuda"), False
