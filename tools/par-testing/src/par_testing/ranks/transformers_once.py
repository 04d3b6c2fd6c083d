"""Imported by the forkserver where tests load models of transformers: makes what they make once in a process.

The first model that a process loads builds the table of how all families' weights are named in files, which takes
0.1 s; ranks find it made.
"""

import importlib

_mapping = importlib.import_module("transformers.conversion_mapping")  # in a types check it may be absent
_mapping.get_checkpoint_conversion_mapping("llama")  # and with it those of all
