"""Imported by the forkserver where tests load models of transformers: makes what they make once in a process.

The first model that a process loads builds the table of how all families' weights are named in files, which takes
0.1 s; ranks find it made.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # type: ignore[no-untyped-call]  # and with it those of all
