"""Supplies the text for calibration and the separate text for measuring."""
