"""The runtime: runs any valid schedule on real processes.

`Pipeline` splits a batch (`microbatches`, `feed`) and lets a `Run` go through this rank's program, action by action: it
takes a message from the wire, runs a `LocalStage` forward or backward, and gives the result to the wire. The other
modules each serve one wish: split backwards (`weight_gradients`, `deferred_layers`), data parallelism
(`gradient_sync`), tied parameters (`shared`), host memory (`offload`), measured times (`clock`).
"""
