"""States that map keys to values, passed over by a sequence's rows: one by one, or in chunks."""
