"""TODO: what lives in ranks."""
