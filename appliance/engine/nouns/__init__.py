"""Requests, sequences, plans and messages: the plain data that flows through the engine."""
