"""What a test measures instead of time: collectives, their volume, bytes that autograd keeps, parity with one device.

`c10d_ops` knows torch's operators, `counting` records them, `volume` and `parity` judge what was recorded or computed.
"""
