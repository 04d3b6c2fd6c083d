"""Kernels for one piece of attention: torch's flash kernels, and plain products for what these do not compute.

`choose` picks one for each kind of piece; all have the interface in `kernel`.
"""
