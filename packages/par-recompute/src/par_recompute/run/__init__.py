"""Runtime of layers that recompute: hooks in `layer` begin and end each call as the `planner` decides.

`frame` is a call that drops some module outputs, `whole` a call that saves only its inputs; `packed` replaces saved
tensors until backward. `away` offloads saved tensors to host memory; `then` restores module state.
"""
