"""The server speaks other people's protocols; it loads neither torch nor transformers."""
