"""The part of all cases: rows in processes of their own, limits between them, one result."""
