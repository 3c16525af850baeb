"""Decides where the experts of each layer stay: on the device, or in host memory."""
