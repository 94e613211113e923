"""case=load: one big file into tensors."""
