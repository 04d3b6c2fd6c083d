"""TODO: what lives in data."""
