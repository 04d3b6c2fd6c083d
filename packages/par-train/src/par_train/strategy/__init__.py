"""TODO: what lives in strategy."""
