"""TODO: what lives in sharding."""
