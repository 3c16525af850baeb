"""Screens that lie over the dashboard."""
