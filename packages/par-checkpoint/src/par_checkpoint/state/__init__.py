"""TODO: what lives in state."""
