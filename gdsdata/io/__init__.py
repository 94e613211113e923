"""The Python side of the engine: how bytes move, with which options and memory."""
