"""Sharding metadata, the contract between the packages: the part of a named global tensor that a local tensor contains.

Layers attach it to tensors (`sharding`), flat buffers list it for several tensors (`segments`), and DTensors are
converted from and to it (`dtensor`). With it, gradients and masters are found wherever they are stored (`gradients`),
and counted once (`ownership`). To find the holders of each box, ranks exchange claims (`held`), which are merged into
tensors (`merging`).
"""
