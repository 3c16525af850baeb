"""The widgets inside the panels; each draws one part of a `View`."""
