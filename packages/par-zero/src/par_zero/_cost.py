"""Memory and traffic of each stage, as functions: what is measured equals them within the padding.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, sections 5 and 7.
"""

from dataclasses import dataclass

import torch

from ._stage import STAGES


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank after a step.

    Args:
        parameters: Bytes of the parameters as the module uses them.
        gradients: Bytes of the gradients that are kept between their reduction and the step.
        optimizer: Bytes of the optimizer's state, and of its own copies of parameters.
        buffers: Bytes that reductions work in, as far as they are kept between steps: at most those of two chunks. In
            backward it is those of all chunks that are under way at a time.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float

    @property
    def total(self) -> float:
        """Bytes of all of it."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def memory(
    stage: int,
    parameters: int,
    ranks: int,
    *,
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    slots: int = 2,
    chunk: int = 0,
    assembled: int = 0,
) -> Memory:
    """Bytes of one rank after a step on gloo. During it, stage 3 adds the parameters of two units.

    Args:
        stage: Stage of `shard`, 0 to 3.
        parameters: Number of elements of all parameters.
        ranks: Number of ranks that share.
        dtype: Dtype of the parameters that the optimizer updates.
        param_dtype: Dtype of the parameters in use. None: `dtype`.
        reduce_dtype: Dtype of the gradients that are kept. None: `param_dtype`.
        slots: Tensors of the optimizer's state for each parameter, in `dtype`: 2 for Adam, 1 for momentum.
        chunk: Elements of a chunk, of which there are two or more; 0 leaves out the buffers, which do not grow with
            the model. Other backends than gloo bring their own to receive into.
        assembled: Number of those of `parameters` that are put together over tensor ranks, for an optimizer that must
            see whole tensors. A rank steps about as many elements as it has parts of, in tensors of their own.
    """
    cuts = STAGES[stage]
    used, reduced = param_dtype or dtype, reduce_dtype or param_dtype or dtype
    copies = slots + (used != dtype)
    # Of each of two chunks: the whole gradient where it is not kept, and what a reduce-scatter receives.
    buffers = 2 * (cuts.shards_gradients + (cuts.shards_state or ranks > 2))
    stepped = assembled * dtype.itemsize / (ranks if cuts.shards_state else 1)
    return Memory(
        parameters=parameters * used.itemsize / (ranks if cuts.shards_parameters else 1),
        gradients=parameters * reduced.itemsize / (ranks if cuts.shards_gradients else 1) + stepped,
        optimizer=parameters * dtype.itemsize * copies / (ranks if cuts.shards_state else 1)
        + (stepped if used == dtype else 0),  # else it is the copy that there is anyway
        buffers=chunk * reduced.itemsize * buffers,
    )


def traffic(
    stage: int,
    parameters: int,
    ranks: int,
    *,
    microbatches: int = 1,
    no_sync: bool = False,
    replicas: int = 1,
    assembled: int = 0,
    tensor: int = 1,
) -> float:
    """Elements that one rank receives in a step.

    Args:
        stage: Stage of `shard`, 0 to 3.
        parameters: Number of elements of all parameters, padding included.
        ranks: Number of ranks that share.
        microbatches: Number of backward passes in a step.
        no_sync: Whether all of them but the last are under `no_sync`.
        replicas: Number of ranks that keep the same share.
        assembled: Number of those of `parameters` that are put together over tensor ranks, for an optimizer that must
            see whole tensors. Gradients go to the rank that steps them, parameters too, and the results come back.
        tensor: Number of tensor ranks.
    """
    cuts = STAGES[stage]
    passes = 1 if no_sync else microbatches
    if cuts.shards_parameters:  # gathered for forward and backward, unless they stay
        count = 2 if no_sync and microbatches > 1 else 3 * microbatches
    elif cuts.shards_state:
        count = passes + 1
    else:
        count = 2 * passes
    hybrid = 2 * (parameters / ranks) * (replicas - 1) / replicas * passes
    moved = assembled / (ranks if cuts.shards_state else 1) * (passes + 2) * (tensor - 1) / tensor
    return parameters * count * (ranks - 1) / ranks + hybrid + moved
