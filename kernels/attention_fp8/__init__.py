"""Prefill attention whose products multiply E4M3 codes."""
