"""Running as a service: the files that start one, and what systemd is told of its state."""
