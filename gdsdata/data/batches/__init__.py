"""Readers: they turn planned samples into batches in memory."""
