"""case=startup: a training script from its start to its first step, by part."""
