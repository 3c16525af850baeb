"""Measure the engine in this process, without HTTP."""
