"""The CPU library: C sources, their build, and the binding through ctypes."""
