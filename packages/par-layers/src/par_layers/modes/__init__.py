"""TODO: what lives in modes."""
