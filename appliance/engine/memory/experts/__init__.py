"""Decides where each layer's experts stay: on the device, or in host memory."""
