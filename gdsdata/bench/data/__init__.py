"""Data that the bench reads and writes, made or the user's own, and what its bytes must be."""
