"""RMS norm, alone or after a residual addition, and rotary position embedding."""
