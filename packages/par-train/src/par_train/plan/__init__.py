"""TODO: what lives in plan."""
