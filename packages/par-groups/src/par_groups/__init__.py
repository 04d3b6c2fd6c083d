"""Which ranks work together, and how tensors are cut over them."""

__version__ = "0.1.0"
