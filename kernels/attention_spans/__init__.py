"""The spans that decode programs share out, made on the device from the context lengths."""
