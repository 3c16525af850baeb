"""Moving whole blocks of all layers: copy-on-write, and out to host memory and back."""
