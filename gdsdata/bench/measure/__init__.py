"""Clocks, memory, the page cache, the GPU, and what this machine can do at most."""
