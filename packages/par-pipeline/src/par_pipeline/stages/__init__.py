"""TODO: what lives in stages."""
