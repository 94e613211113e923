"""Data that the bench reads and writes, and what its bytes must be."""
