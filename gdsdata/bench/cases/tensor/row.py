"""The row's side of case=tensor."""

from gdsdata.bench.cases.latency.row import LatencyRow

WARM_UP, MOST_SECONDS = 1, 240  # of a run


class TensorRow(LatencyRow):
    torch_threads = None  # Copies are as a user gets them.

    def asked(self):
        return self.settings.loop, WARM_UP, MOST_SECONDS, self.settings.validate

    def attempt(self, state):
        """One load or store that is neither compared nor timed."""
        try:
            self.prepare_work(state, check=False)
            self.once()
        finally:
            self.close()
        return {}
