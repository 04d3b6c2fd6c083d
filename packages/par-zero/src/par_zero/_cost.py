"""Memory and traffic of each stage, as formulas. Measurements agree with them up to the padding of chunks.

A search over thousands of configurations needs them. `predict_step` counts one configuration exactly, offload included.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, sections 5 and 7.
"""

from dataclasses import dataclass

import torch

from ._policies import MixedPrecision
from ._stage import STAGES


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank after a step.

    Args:
        parameters: Bytes of the parameters as the module uses them.
        gradients: Bytes of the reduced gradients, which exist until you drop them, as by `zero_grad`.
        optimizer: Bytes of the optimizer's state and of its master weights.
        buffers: Bytes of the buffers for reductions in flight. At most these bytes are kept between steps.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float

    @property
    def total(self) -> float:
        """Sum of all bytes."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def memory(
    stage: int,
    parameters: int,
    ranks: int,
    *,
    dtype: torch.dtype = torch.float32,
    precision: MixedPrecision | None = None,
    slots: int = 2,
    chunk: int = 0,
    assembled: int = 0,
    inflight: int = 2,
) -> Memory:
    """Return the bytes of one rank after a step on gloo. During the step, stage 3 adds the parameters of two units.

    All data is on the device. The `tiers` of `predict_step` have the bytes with offload.

    Args:
        stage: Stage of `shard`, 0 to 3.
        parameters: Number of elements of all parameters that these ranks shard. With `expert_groups`, add the bytes of
            a call for each group, whose number of elements is that of the parameters that a rank holds. All groups
            share the buffers.
        ranks: Number of ranks that shard the parameters.
        dtype: Dtype of the parameters that the optimizer updates.
        precision: Dtypes, as for `shard`. None: all tensors have `dtype`.
        slots: Tensors of the optimizer's state for each parameter, in `dtype`: 2 for Adam, 1 for momentum.
        chunk: Number of elements of a chunk, of which there are two or more. 0: the buffers of reductions are not
            counted. They do not grow with the model. Backends other than gloo bring receive buffers of their own.
        assembled: Number of those of `parameters` that are assembled over tensor-parallel ranks, for an optimizer that
            needs full tensors. A rank steps about as many elements as its shards have, in tensors of their own.
        inflight: Number of chunks whose reductions are in flight at a time, as `Overlap` has it. Two are kept between
            steps if `shard` got no number. During backward the default is then too low: up to all chunks are in flight
            on a CPU, and at stages 2 and 3 with `expert_groups` on every device.
    """
    cuts = STAGES[stage]
    dtypes = precision or MixedPrecision()
    used = dtypes.param_dtype or dtype
    reduced = dtypes.reduce_dtype or used
    # Master weights are one more tensor if the module computes in another dtype.
    copies = slots + (used != dtype)
    # Each chunk in flight needs a buffer for its full gradient, unless that is kept, and one for a reduce-scatter. At
    # stage 0, two ranks all-reduce in place instead.
    buffers = inflight * (cuts.shards_gradients + (cuts.shards_state or ranks > 2))
    share = ranks if cuts.shards_state else 1
    stepped = assembled * dtype.itemsize / share
    return Memory(
        parameters=parameters * used.itemsize / (ranks if cuts.shards_parameters else 1),
        gradients=parameters * reduced.itemsize / (ranks if cuts.shards_gradients else 1) + stepped,
        # In another dtype an assembled tensor is the copy that exists anyway.
        optimizer=parameters / share * dtype.itemsize * copies + (stepped if used == dtype else 0),
        buffers=chunk * reduced.itemsize * buffers,
    )


def traffic(
    stage: int,
    parameters: int,
    ranks: int,
    *,
    microbatches: int = 1,
    no_sync: bool = False,
    keep: bool = True,
    replicas: int = 1,
    assembled: int = 0,
    tensor: int = 1,
) -> float:
    """Return the number of elements that one rank receives in a step.

    Args:
        stage: Stage of `shard`, 0 to 3.
        parameters: Number of elements of all parameters, padding included.
        ranks: Number of ranks that shard the parameters.
        microbatches: Number of backward passes in a step.
        no_sync: Whether all backward passes but the last are under `no_sync`.
        keep: Whether stage 3 keeps parameters gathered under `no_sync`.
        replicas: Number of ranks that hold the same shard.
        assembled: Number of those of `parameters` that are assembled over tensor-parallel ranks, for an optimizer that
            needs full tensors. The rank that steps them receives their gradients and shards, and returns the results.
        tensor: Number of tensor-parallel ranks.
    """
    cuts = STAGES[stage]
    passes = 1 if no_sync else microbatches
    if cuts.shards_parameters:  # gathered for forward and backward, unless they stay
        gathers = 1 if no_sync and keep and microbatches > 1 else 2 * microbatches
        count = gathers + passes
    elif cuts.shards_state:
        # Each pass reduce-scatters gradients, and the step all-gathers parameters once.
        count = passes + 1
    else:
        # An all-reduce receives as much as a reduce-scatter and an all-gather.
        count = 2 * passes
    # Replicas all-reduce each shard, which receives 2 (n - 1) / n of its elements.
    hybrid = 2 * (parameters / ranks) * (replicas - 1) / replicas * passes
    # An assembled tensor moves three kinds of data: gradients in each pass, the parameter before the step and the
    # result after it.
    moved = assembled / (ranks if cuts.shards_state else 1) * (passes + 2) * (tensor - 1) / tensor
    return parameters * count * (ranks - 1) / ranks + hybrid + moved
