"""Checkpoints that are saved while training goes on, in a folder of them."""
