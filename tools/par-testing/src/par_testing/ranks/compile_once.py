"""Imported by the forkserver where rank tests compile: what a first `torch.compile` imports, a second for each rank."""

import importlib

for _module in ("torch._functorch.partitioners", "torch._inductor.lowering", "torch._inductor.pattern_matcher"):
    importlib.import_module(_module)  # private ones, which a types check need not follow
