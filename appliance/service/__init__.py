"""Runs the server as a service: unit and container files, and systemd notifications."""
