"""The archives that `torch.save` writes."""
