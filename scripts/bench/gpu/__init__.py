"""Every figure that needs a GPU: kernels, the engine, and their peers, in one run."""
