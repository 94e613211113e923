"""case=latency: one tensor read or written again and again, by size."""
