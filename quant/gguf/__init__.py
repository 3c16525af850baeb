"""Writes GGUF files: settings and vocabulary, the places of tensors, and the file itself."""
