"""TODO: what lives in scale."""
