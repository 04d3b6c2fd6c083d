"""The runtime: runs any valid schedule on real processes.

`Pipeline` splits a batch (`microbatches`, `feed`) and starts a `StepExecution`, which executes this rank's program.
Each action takes a message from the wire, runs a `LocalStage` forward or backward, and sends the result over the wire.
The other modules each add one feature: split backwards (`weight_gradients`, `deferred_layers`), data parallelism
(`gradient_sync`), tied parameters (`shared`), host memory (`offload`), measured times (`clock`), and several stages of
a rank as one module (`stage_modules`).
"""
