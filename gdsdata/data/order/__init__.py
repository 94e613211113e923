"""The order of an epoch: which samples come when, computed for the batches that are asked for."""
