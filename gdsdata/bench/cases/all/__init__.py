"""case=all: every other case, one after the other, on one page."""
