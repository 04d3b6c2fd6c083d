"""TODO: what lives in counting."""
