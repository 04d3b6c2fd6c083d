"""TODO: what lives in tools."""
