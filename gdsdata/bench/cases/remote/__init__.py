"""case=remote: bytes of an object store, by range, object, sample and batch."""
