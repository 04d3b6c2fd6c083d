"""TODO: what lives in live."""
