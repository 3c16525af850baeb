"""Text for calibration, and separate text for measuring."""
