"""Multi-rank tests in milliseconds."""
