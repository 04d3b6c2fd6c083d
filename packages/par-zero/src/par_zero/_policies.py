"""The policies that `shard` takes: each option of `shard` is declared here, once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

Units = str | Callable[[nn.Module], bool] | Sequence[nn.Module]
"""FSDP units: "auto", a function that returns whether a module is a unit, or the modules themselves."""

InitFn = Callable[[nn.Module, str], None]
"""Function that initializes a module; its second argument is the prefix of the module's names, such as "blocks.0."."""

PerGroup = bool | Callable[[Mapping[str, Any]], bool]
"""An answer for all param groups, or a function that returns the answer for the dict of a param group."""

Policy = TypeVar("Policy")


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Dtypes of parameters and gradients.

    Args:
        param_dtype: Dtype of the parameters that the module computes with, such as `torch.bfloat16`. The optimizer then
            steps master weights in the original dtype. None: the original dtype, without master weights.
        reduce_dtype: Dtype in which gradients are summed over microbatches and ranks. None: the parameters' dtype.
        reduce_op: "mean" or "sum" of the gradients over the data-parallel ranks. The mean divides by the number of
            ranks of `group` and `replicas`, also for parameters of `expert_groups`, unless these name a divisor.

    Raises:
        TypeError: A dtype is not a `torch.dtype`.
        ValueError: A dtype is not a floating-point dtype of 16 bits or more, or `reduce_op` is another text.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduce_op: str = "mean"

    def __post_init__(self) -> None:
        if self.reduce_op not in ("mean", "sum"):
            raise ValueError(f"reduce_op={self.reduce_op!r}: gradients are averaged or summed; pass 'mean' or 'sum'")
        for name, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name}={dtype!r}: it must be a torch.dtype; pass one, such as torch.bfloat16")
            if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
                raise ValueError(
                    f"{name}={dtype}: gradients need a floating-point dtype of 16 bits or more; pass such a dtype"
                )


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap of collectives with computation.

    Args:
        bucket: Bytes of parameters that one collective reduces, such as 10_000_000. "auto": `bucket_bytes` of the
            number of ranks, which is at least 25 MB and grows with the number of ranks.
        inflight: Largest number of chunks whose reductions are in flight during backward. Backward waits for the oldest
            reduction before it begins one more, so this bounds the memory of reductions. None: two on a GPU, whose
            stream waits, and no limit on a CPU or with `expert_groups`. A wait within backward can deadlock where
            backward itself communicates, such as with experts, and data decides which parameters get gradients on a
            rank. In that case pass None on a CPU and the number of chunks on a GPU. If you pass fewer chunks together
            with `expert_groups`, stages 0 to 2 reduce a chunk as soon as its gradients are complete on this rank.
        gather_group: Second communicator of the ranks of `group`, in the same order, on which stage 3 all-gathers
            parameters, such as `groups.channels("data", 1)[0]`. Its owner destroys it. None: `shard` creates one, which
            exists until torch.distributed ends.

    Raises:
        TypeError: `bucket` or `inflight` is not an integer.
        ValueError: `bucket` or `inflight` is less than 1.
    """

    bucket: int | Literal["auto"] = 10_000_000
    inflight: int | None = None
    gather_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        # `isinstance` would accept True and False, which are no sizes.
        if self.bucket != "auto" and type(self.bucket) is not int:
            raise TypeError(f"bucket={self.bucket!r}: it is a number of bytes; pass an int, such as 10**7, or 'auto'")
        if self.inflight is not None and type(self.inflight) is not int:
            raise TypeError(f"inflight={self.inflight!r}: it is a number of chunks; pass an int, such as 2, or None")
        if isinstance(self.bucket, int) and self.bucket < 1:
            raise ValueError(f"bucket={self.bucket}: a bucket has bytes; pass 1 or more, or 'auto'")
        if self.inflight is not None and self.inflight < 1:
            raise ValueError(f"inflight={self.inflight}: one chunk must be in flight; pass 1 or more, or None")

    def bucket_of(self, ranks: int) -> int:
        """Return the bytes of parameters that one collective reduces.

        Args:
            ranks: Number of ranks that shard the parameters.
        """
        return bucket_bytes(ranks) if isinstance(self.bucket, str) else self.bucket


@dataclass(frozen=True, kw_only=True)
class OptimizerUpdate:
    """Update scope of an optimizer: the tensors that its step must see.

    Known optimizers need no declaration: Adam, for example, updates each element separately and steps flat shards, and
    Muon needs full matrices. An optimizer of an unknown class steps full tensors, each on one rank, unless you declare
    that it is elementwise.

    Args:
        elementwise: Whether the optimizer updates each element separately, so that it can step flat shards. `shard`
            checks the declaration of an unknown class by a trial. True: every param group; or a function of a param
            group's dict.
        atomic: Whether the optimizer needs each parameter as a full tensor, which one rank then stores and steps. True:
            every param group; or a function of a param group's dict, such as `lambda group: "matrices" in group`.
        tensor_group: Tensor-parallel ranks, which hold the other shards of parameters. An atomic parameter that is
            sharded over them is assembled on one of them for the step. A parameter whose sharding metadata has several
            boxes, such as fused q, k and v, is assembled as one tensor per box. A gradient whose metadata declares a
            partial sum is summed over the ranks of this group that hold a replica. None: a sharded atomic parameter
            raises an error.

    Raises:
        TypeError: `elementwise` or `atomic` is neither a bool nor a function.
    """

    elementwise: PerGroup = False
    atomic: PerGroup = False
    tensor_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name, value in (("elementwise", self.elementwise), ("atomic", self.atomic)):
            if not isinstance(value, bool) and not callable(value):
                raise TypeError(
                    f"{name}={value!r}: it holds for all or for each param group; pass True, False, or a function of a "
                    "param group"
                )


@dataclass(frozen=True, kw_only=True)
class ParameterInit:
    """Initialization of parameters on the meta device, and the device of all parameters.

    Args:
        init_fn: Function that initializes a module in place, called with each FSDP unit just before it is sharded, so
            that the full model never exists. Its second argument is the prefix of the unit's names: "blocks.0.". The
            last call gets the root module, in which only tensors outside of all units are left. Parameters keep
            their identity, shape and dtype; buffers are initialized too. `par_layers.initialize` with a seed is such a
            function. None: tensors on the meta device get memory without values, and you load a checkpoint before the
            first forward. Buffers that no state dict contains stay on the meta device until the load creates them.
        device: Device of all parameters and buffers. None: the device where they are, or where `init_fn` puts them.
            Tensors on the meta device go to the device of the other tensors, or else to torch's default device.

    Raises:
        TypeError: `init_fn` is not callable, or `device` is not a `torch.device`.
        ValueError: `device` is the meta device.
    """

    init_fn: InitFn | None = None
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if self.init_fn is not None and not callable(self.init_fn):
            raise TypeError(
                f"init_fn={self.init_fn!r}: it is a function of a module and the prefix of its names; pass one, or None"
            )
        if self.device is not None and not isinstance(self.device, torch.device):
            raise TypeError(
                f"device={self.device!r}: it must be a torch.device; pass one, such as torch.device('cuda', 0), or None"
            )
        if self.device is not None and self.device.type == "meta":
            raise ValueError(
                f"device={str(self.device)!r}: tensors have no memory there; pass the device where the module computes"
            )


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options of `shard` that decide how parameters are packed into chunks.

    Args:
        units: FSDP units, as for `shard`.
        precision: Dtypes of parameters and gradients.
        overlap: Sizes of buckets, and how many of them are in flight.
        update: Update scope of the optimizer.
    """

    units: Units = "auto"
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    overlap: Overlap = field(default_factory=Overlap)
    update: OptimizerUpdate = field(default_factory=OptimizerUpdate)

    @classmethod
    def of(
        cls,
        *,
        units: Units = "auto",
        precision: MixedPrecision | Mapping[str, Any] | None = None,
        overlap: Overlap | Mapping[str, Any] | None = None,
        update: OptimizerUpdate | Mapping[str, Any] | None = None,
    ) -> "ShardOptions":
        """Return the options for keywords of `shard`, whose policies may be mappings or None.

        Raises:
            TypeError, ValueError: A value is not allowed.
        """
        return cls(
            units=units,
            precision=policy_of(MixedPrecision, "precision", precision),
            overlap=policy_of(Overlap, "overlap", overlap),
            update=policy_of(OptimizerUpdate, "update", update),
        )


def policy_of(kind: type[Policy], name: str, given: object) -> Policy:
    """Return a policy that was passed as such, as a mapping of its arguments, or as None for its defaults.

    Args:
        kind: Class of the policy.
        name: Name of the argument, for errors.
        given: Value that was passed.

    Raises:
        TypeError: The value is something else, or the mapping has another name.
        ValueError: A value of the mapping is not allowed.
    """
    if isinstance(given, kind):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name}={given!r}: pass a par_zero.{kind.__name__}, a mapping of its arguments, or None")
    names = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]  # policies are dataclasses
    for each in given or ():
        if each not in names:
            raise TypeError(f"{name}[{each!r}]: {kind.__name__} has no such argument; use one of {', '.join(names)}")
    return kind(**(given or {}))


def bucket_bytes(ranks: int, *, latency: float = 8e-6, bandwidth: float = 45e9) -> int:
    """Return the bytes of parameters that are worth a collective of their own: the meaning of `bucket="auto"`.

    On a ring of n ranks, a collective of B bytes takes (n - 1) l for its hops and (n - 1) / n B / w for its bytes. With
    B = max(25 MB, 10 (n - 1) l w) the hops take at most a tenth to a fifth of the time of the bytes, for every n.

    Args:
        ranks: Number n of ranks that shard the parameters.
        latency: Latency l of one hop, in seconds. The default assumes hosts with a fast network between them.
        bandwidth: Bandwidth w of one rank, in bytes per second. The default assumes the same hosts.

    Raises:
        ValueError: `ranks` is less than 1, or a latency or bandwidth is negative.
    """
    if ranks < 1 or latency < 0 or bandwidth < 0:
        raise ValueError(
            f"ranks={ranks}, latency={latency}, bandwidth={bandwidth}: they describe no ring; pass 1 rank or more, and "
            "no negative numbers"
        )
    return max(25_000_000, round(10 * (ranks - 1) * latency * bandwidth))
