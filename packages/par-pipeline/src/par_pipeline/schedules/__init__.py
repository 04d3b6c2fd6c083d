"""TODO: what lives in schedules."""
