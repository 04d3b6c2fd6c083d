"""TODO: what lives in runtime."""
