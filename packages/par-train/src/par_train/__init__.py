"""The pieces of par wired together."""

__version__ = "0.1.0"
