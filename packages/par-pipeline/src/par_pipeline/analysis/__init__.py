"""TODO: what lives in analysis."""
