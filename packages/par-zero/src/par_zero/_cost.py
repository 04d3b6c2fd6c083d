"""Memory and traffic of each stage, as functions: what is measured equals them within the padding.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, sections 5 and 7.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank after a step.

    Args:
        parameters: As the module uses them.
        gradients: As they are kept between reduction and step.
        optimizer: Its state, and its own copies of parameters.
        buffers: What two chunks that are reduced at a time use, one pair after the other.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
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
) -> Memory:
    """Bytes of one rank after a step on gloo. During it, stage 3 adds the parameters of two units.

    Args:
        stage: 0 to 3.
        parameters: Elements of all parameters.
        ranks: That share.
        dtype: Of the parameters that the optimizer updates.
        param_dtype: Of the parameters in use; default: `dtype`.
        reduce_dtype: Of the gradients that are kept; default: `param_dtype`.
        slots: Tensors of the optimizer's state for each parameter, in `dtype`: 2 for Adam, 1 for momentum.
        chunk: Elements of a chunk, of which there are two or more; 0 leaves out the buffers, which do not grow with
            the model. Other backends than gloo bring their own to receive into.
    """
    used, reduced = param_dtype or dtype, reduce_dtype or param_dtype or dtype
    shared = [1.0 if stage < first else 1.0 / ranks for first in (3, 2, 1)]
    copies = slots + (used != dtype)
    buffers = 2 * ((stage > 1) + (stage > 0 or ranks > 2))  # whole gradients, and what a reduce-scatter receives
    return Memory(
        parameters=parameters * used.itemsize * shared[0],
        gradients=parameters * reduced.itemsize * shared[1],
        optimizer=parameters * dtype.itemsize * copies * shared[2],
        buffers=chunk * reduced.itemsize * buffers,
    )


def traffic(
    stage: int, parameters: int, ranks: int, *, microbatches: int = 1, no_sync: bool = False, replicas: int = 1
) -> float:
    """Elements that one rank receives in a step.

    Args:
        stage: 0 to 3.
        parameters: Elements of all parameters, padding included.
        ranks: That share.
        microbatches: Backward passes in a step.
        no_sync: Whether all of them but the last are under `no_sync`.
        replicas: The number of ranks that keep the same share.
    """
    passes = 1 if no_sync else microbatches
    if stage == 0:
        count = 2 * passes
    elif stage < 3:
        count = passes + 1
    else:  # gathered for forward and backward, unless it stays
        count = 2 if no_sync and microbatches > 1 else 3 * microbatches
    hybrid = 2 * (parameters / ranks) * (replicas - 1) / replicas * passes
    return parameters * count * (ranks - 1) / ranks + hybrid
