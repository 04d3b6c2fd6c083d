"""TODO: what lives in layers."""
