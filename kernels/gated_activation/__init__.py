"""The gate of a gated MLP: act(gate) * up."""
