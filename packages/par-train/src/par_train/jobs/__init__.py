"""TODO: what lives in jobs."""
