"""Parts of the soak (tests/soak.py) and of the chaos (tests/chaos.py): docs/internals/long-runs.md."""
