"""The GPU that Triton compiles for: what it can do, and compiling ahead of a launch."""
