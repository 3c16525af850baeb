"""The engine of models that only read texts."""
