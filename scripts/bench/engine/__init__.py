"""The engine in this process, without HTTP."""
