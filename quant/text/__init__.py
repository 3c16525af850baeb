"""The text that calibrates and, apart from it, the text that measures."""
