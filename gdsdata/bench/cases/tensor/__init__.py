"""case=tensor: one big tensor loaded and stored, as in the table of DeepNVMe."""
