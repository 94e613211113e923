"""case=replicas: several ranks load the same checkpoint, all of it."""
