"""gdsdata's own rows."""
