"""TODO: what lives in norm."""
