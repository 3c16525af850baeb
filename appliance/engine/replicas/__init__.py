"""Several engine processes of one model: the routing of requests, and their common state."""
