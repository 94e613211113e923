"""The order of an epoch: which samples come when, evaluated only for the batches that are asked for."""
