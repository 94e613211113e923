"""case=replicas: several ranks load the same checkpoint, or take the same batches."""
