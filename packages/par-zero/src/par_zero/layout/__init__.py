"""TODO: what lives in layout."""
