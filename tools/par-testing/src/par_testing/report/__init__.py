"""TODO: what lives in report."""
