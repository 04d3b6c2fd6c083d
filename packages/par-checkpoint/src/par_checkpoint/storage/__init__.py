"""TODO: what lives in storage."""
