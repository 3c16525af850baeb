"""The gated norm behind a recurrent state."""
