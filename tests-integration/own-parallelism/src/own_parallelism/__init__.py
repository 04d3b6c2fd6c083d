"""Parallelism of one's own, in a wheel of its own. Nobody imports it by name: entry points say what is where."""
