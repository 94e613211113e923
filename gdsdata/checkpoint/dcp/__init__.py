"""Storage and planners for torch.distributed.checkpoint."""
