"""The order of an epoch: the samples of each batch, computed on request."""
