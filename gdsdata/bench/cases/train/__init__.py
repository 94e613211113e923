"""case=train: a training loop from files to weights."""
