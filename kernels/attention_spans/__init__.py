"""Cuts the keys of decode rows into spans on the device, from the context lengths."""
