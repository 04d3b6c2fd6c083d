"""Flat buffers, called chunks, of parameters, their gradients and the optimizer's tensors.

`units` groups parameters by module, `sharers` holds their data-parallel groups, `packing` computes positions in a
buffer, `build` makes the chunks, and `records` attaches sharding metadata to every tensor. `sizes` predicts the chunks
before any exists. A step uses a `chunk`, whose gradient memory `buffers` lends. `fill` materializes tensors of the meta
device, and `unwritten` detects tensors without values. Only `alike` and `records` communicate, once, while `shard`
runs.
"""
