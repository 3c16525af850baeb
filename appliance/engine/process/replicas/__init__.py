"""Several engine processes of one model: routing and common state."""
