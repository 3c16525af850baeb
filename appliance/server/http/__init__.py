"""HTTP itself: connections, bodies, streams, errors, keys, limits."""
