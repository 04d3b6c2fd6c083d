"""Transfers of bytes between local tensors and blocks, between ranks, and between blocks and files.

`write` and `read` carry out a plan; neither imports the other. Both use the communicator of the ranks (`ranks`), the
pieces in a rank's memory (`memory`) and the sending of pieces (`exchange`).
"""
