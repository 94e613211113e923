"""The row's side of case=tensor."""

from gdsdata.bench.cases.latency.row import LatencyRow


class TensorRow(LatencyRow):
    case = "tensor"
    torch_threads = None  # Copies are as a user gets them.

    def attempt(self, state):
        """One load or store that is neither compared nor timed."""
        try:
            self.get_ready(state, check=False)
            self.once()
        finally:
            self.close()
        return {}
