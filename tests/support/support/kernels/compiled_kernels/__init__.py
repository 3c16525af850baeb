"""What the GPU kernels are compiled to, with no GPU, and the gates that judge it."""
