"""Part of a named global tensor that a local tensor contains: the contract between the packages.

Layers attach a record (`sharding`), flat buffers list several (`segments`), DTensors are read and made (`dtensor`); by
it gradients and masters are found wherever they live (`gradients`) and counted once (`ownership`). The records of all
ranks together say who holds which box: ranks exchange claims (`held`), which are merged into tensors (`merging`).
"""
