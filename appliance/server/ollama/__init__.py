"""Ollama's API below /api, for one model that is always loaded."""
