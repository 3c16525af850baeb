"""What is drawn inside the panels: each widget shows one part of a `View`."""
