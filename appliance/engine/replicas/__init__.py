"""Several engine processes of one model: who gets a request, and what they are together."""
