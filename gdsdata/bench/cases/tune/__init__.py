"""case=tune: the best engine options for a path and device."""
