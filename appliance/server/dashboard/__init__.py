"""Feeds for dashboards, and the status page for browsers."""
