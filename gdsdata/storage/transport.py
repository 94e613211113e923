"""Requests to servers, beside the engine's own ranges: lists, sizes, small reads, and writes."""
