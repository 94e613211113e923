"""case=loader: shuffled batches; every loader reads the same files, warm and cold."""
