"""TODO: what lives in run."""
