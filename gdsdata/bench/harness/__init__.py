"""The part of all cases: rows in processes of their own, limits, one result."""
