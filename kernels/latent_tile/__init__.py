"""The inner loop that reads latents on the GPU."""
