"""TODO: what lives in rounding."""
