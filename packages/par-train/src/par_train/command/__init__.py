"""TODO: what lives in command."""
