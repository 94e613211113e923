"""Data sets: what is read, in which order, by which rank, and what becomes of it."""
