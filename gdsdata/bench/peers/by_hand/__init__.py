"""Loops that a user would write by hand, each in its best sensible form."""
