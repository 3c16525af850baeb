"""Grammar-constrained answers: compiled beside the engine's steps, followed token by token."""
