"""A process of its own inside a rank, for what a trainer does with nothing parallel; and models and rows."""

import os
from contextlib import contextmanager

import torch

from ..tiny_llama import TEXT, WORDS

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextmanager
def alone():
    """A context in which Accelerate believes that this rank is the only process; after it, it asks anew."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kept = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()


def rows(count=32, length=12):
    """Rows of a data set: of each, another number of tokens counts."""
    generator = torch.Generator().manual_seed(1)
    for row in range(count):
        ids = torch.randint(0, WORDS, (length,), generator=generator)
        labels = ids.clone()
        labels[: row % (length - 2)] = -100
        yield {"input_ids": ids, "labels": labels}


def make_model(**options):
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, **options}))
