"""The server of tests/server, with the engine that repeats its prompt."""

from __future__ import annotations

from tests.server.conftest import byte_tokenizer, forks, serve, tokenizer_folder, tokenizer_with

__all__ = ["byte_tokenizer", "forks", "serve", "tokenizer_folder", "tokenizer_with"]
