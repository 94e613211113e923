"""The archives that `torch.save` writes: where their tensors lie, and what their pickles say."""
