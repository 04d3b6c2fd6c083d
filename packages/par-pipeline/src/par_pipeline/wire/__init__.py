"""TODO: what lives in wire."""
