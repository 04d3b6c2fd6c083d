"""TODO: what lives in topology."""
