"""Parts of the soak and of the chaos: docs/internals/long-runs.md."""
