"""TODO: what lives in transfer."""
