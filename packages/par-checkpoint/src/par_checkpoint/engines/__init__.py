"""Inference engines that load the versions of a `Publisher`: vLLM and verl.

`weights` receives complete versions under the names of the engine's checkpoint folder. `vllm` and `verl` hand them to
the engine. They are imported by the engine, which must be installed; par-checkpoint does not install it.
"""

MISSING = "par_checkpoint.engines.{name} needs {name}, which is not installed; run it in the environment of {name}"
