"""TODO: what lives in format."""
