"""The options of a strategy, checked before anything communicates."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch

from par_groups import LaneCounts, ProcessGroups
from par_plan import read_budget
from par_precision import precision_of
from par_recompute import Keep, Layers

from .handlers import DATA_PARALLEL, DEFAULT, kinds_of
from .plugin import Plugin
from .settings import check_autocast, policy_of

_ZERO = ("stage", "units", "precision", "overlap", "offload", "update", "init", "expert_groups")
"""Keywords of `par_zero.shard` that a strategy passes on."""

P = ParamSpec("P")
R = TypeVar("R")


def takes_options_of(options: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Return a decorator for a function whose `**keywords` are those of a dataclass of options.

    Type checkers, editors and `help()` then list the options one by one, and nobody declares them a second time.

    Args:
        options: The dataclass, whose docstring documents the options. A function without a docstring takes it over.
    """

    def decorate(function: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        own = inspect.signature(function)
        # Keyword parameters of the dataclass follow the function's own, as Python requires.
        first = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        every = [*first, *inspect.signature(options).parameters.values()]
        function.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]
        function.__doc__ = function.__doc__ or options.__doc__
        return function

    return decorate


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of a `Strategy`, checked and frozen.

    Args:
        parallel: The sizes and modes of the axes, as `par_groups.Topology.from_config` takes them; or live
            `ProcessGroups` to use, which outlive the strategy. Default: data parallelism over all ranks.
        precision: The precision of weights and arithmetic, such as "bf16"; or a mapping with `precision` and other
            keywords of `par_precision.mixed`, such as dict(precision="bf16", output_dtype=None).
        zero: The ZeRO stage, 0 to 3; or a mapping with `stage` and other keywords of `par_zero.shard`, such as
            dict(stage=1, update=dict(elementwise=True)) for an elementwise optimizer of your own.
        clip_norm: The maximum of the 2-norm over all gradients. If the norm is larger, gradients are scaled down.
            Default: no clipping.
        pipeline: `schedule` and `microbatches` of `execute_pipeline`, and other keywords of `par_pipeline.Pipeline`.
        recompute: The activations that backward recomputes: a policy of `par_recompute`, or a text, such as "cheap",
            "layers", "layers:2", "keep:0.4" or "keep:6GB". It applies to models with an optimizer and does not change
            the loss. Default: no recomputation.
        memory: The bytes of a rank in each memory tier, such as {"device": "80GB", "host": "200GB", "disk": "1TB",
            "path": "/scratch"}; "activations" reserves bytes of the device for activations. The strategy offloads or
            recomputes whatever exceeds the device's budget. The first step runs with as little on the device as
            possible and is measured. From the second step on, the device stores whatever saves the most time per byte.
            A budget supports one optimizer. Two chunks are reduced at a time, unless `zero` sets
            `overlap=dict(inflight=...)`. Default: everything stays on the device.
        gradient_handlers: The handlers that complete gradients before the optimizer's step, in order: a
            `dict(type=NAME, ...)` each. Default: the built-in handlers.
        plugins: Plugins, names under which packages declare one, or "module:Class".
        device: A device, such as "cuda" or "cpu". Default: this rank's accelerator if it has one, else the CPU.
        seed: The seed of weights that are made here, of the order of data, and of torch's generators in each step.
            Strategies of one program that must draw different random numbers need different seeds.
        numerics: "ordinary": each topology has its own order of sums. "canonical": the weights after each step do not
            depend on the topology, to the last bit, on ranks of one kind with one version of torch. Gradients then take
            8 bytes per parameter.
        lanes: The number of microbatches in a step of canonical numerics, over all data ranks. Data ranks must divide
            it. `execute_pipeline` splits a rank's batch into its lanes; a loop of your own calls `backward` for each.
            `par_groups.LaneCounts`, or dict(data=8, tensor=4), also has the number of blocks of each weight, which runs
            over several tensor ranks need.
        broadcast_batches: Whether one rank of each replica reads a data loader and broadcasts its batches to the
            replica's tensor, sequence and pipeline ranks, which must then take batches together. If False, every rank
            reads for itself.
        uneven_batches: Whether the batch of a data loader need not divide by the data ranks. Ranks then get numbers of
            samples that differ by at most one, and the loop must pass its samples to `backward` as `weight`.

    Raises:
        ValueError, TypeError: An option has a wrong value, or two options contradict each other.
    """

    parallel: Mapping[str, Any] | ProcessGroups | None = None
    precision: str | Mapping[str, Any] = "fp32"
    zero: int | Mapping[str, Any] = 0
    clip_norm: float | None = None
    pipeline: Mapping[str, Any] | None = None
    recompute: Any = None
    memory: Mapping[str, Any] | None = None
    gradient_handlers: Sequence[Mapping[str, Any]] = DEFAULT
    plugins: Sequence[Plugin | str] = ()
    device: str = "auto"
    seed: int = 0
    numerics: Literal["ordinary", "canonical"] = "ordinary"
    lanes: int | Mapping[str, int] | LaneCounts | None = None
    broadcast_batches: bool = True
    uneven_batches: bool = False

    def __post_init__(self) -> None:
        for name, given in (("plugins", self.plugins), ("gradient_handlers", self.gradient_handlers)):
            # A string is a sequence too: each of its letters would be looked up as a plugin.
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise TypeError(f"{name}={given!r}: it must be a list; pass {name}=[{given!r}]")
        policy_of(self.recompute)
        read_budget(self.memory)
        for key in self.zero_keywords:
            if key not in _ZERO:
                raise ValueError(f"zero[{key!r}]: par_zero.shard has no such option; use one of {', '.join(_ZERO)}")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.stage!r}: it must be 0, 1, 2 or 3; pass one of these")
        for name in ("broadcast_batches", "uneven_batches"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: it must be a bool; pass True or False")
        # The strategy weighs microbatches and ties parameters itself; a second rule would contradict it.
        own = sorted({"loss_fn", "weight", "shared"} & set(self.pipeline_keywords))
        if own:
            raise ValueError(f"pipeline={self.pipeline_keywords}: the strategy sets {own[0]!r} itself; remove it")
        precision_of(self.precision_name)  # it raises for an unknown name
        if "param_dtype" not in self.zero_policy("precision"):
            check_autocast(self.stage, self.precision_name)
        if self.stage and not self.shards:
            raise ValueError(
                f"zero={self.stage}: it reduces gradients itself, but gradient_handlers lacks {DATA_PARALLEL!r}; add "
                "it, or use zero=0"
            )
        self._check_numerics()
        if self.memory is not None and "offload" in self.zero_keywords:
            raise ValueError(f"memory={dict(self.memory)}: zero has an `offload` of its own; pass one of them")
        if self.memory is not None and not self.shards:
            raise ValueError(
                f"memory={dict(self.memory)}: gradient_handlers lacks {DATA_PARALLEL!r}, which does the offloading; "
                "add it, or remove memory"
            )

    def _check_numerics(self) -> None:
        if self.numerics not in ("ordinary", "canonical"):
            raise ValueError(f"numerics={self.numerics!r}: it is unknown; pass 'ordinary' or 'canonical'")
        if self.numerics == "ordinary":
            if self.lanes is not None:
                raise ValueError(f"lanes={self.lanes}: ordinary numerics have no lanes; add numerics='canonical'")
            return
        if self.lanes is None:
            raise ValueError("lanes=None: canonical numerics need a number of lanes; pass one, such as 8")
        try:
            self.canonical_lanes  # noqa: B018 - for its errors
        except TypeError as error:
            raise ValueError(f"lanes={self.lanes!r}: {error}; pass dict(data=8, tensor=4)") from None
        if self.precision_name not in ("fp32", "bf16"):
            raise ValueError(
                f"precision={self.precision_name!r} with numerics='canonical': only 'fp32' and 'bf16' have exact sums; "
                "pass one of them"
            )
        if "microbatches" in self.pipeline_keywords:
            raise ValueError(
                f"pipeline={self.pipeline_keywords}: canonical numerics choose `microbatches`, the lanes of a data "
                "rank; remove it"
            )
        own = sorted({"reduce_dtype", "reduce_op"} & self._own_policy("precision").keys())
        if own or not self.shards:
            raise ValueError(
                "numerics='canonical': gradients are summed by par-zero in fp64; remove "
                + (f"zero['precision'][{own[0]!r}]" if own else "your gradient_handlers")
            )

    @property
    def canonical_lanes(self) -> LaneCounts | None:
        """The numbers of lanes; None for ordinary numerics."""
        if self.lanes is None or isinstance(self.lanes, LaneCounts):
            return self.lanes
        return LaneCounts(**self.lanes) if isinstance(self.lanes, Mapping) else LaneCounts(data=self.lanes)

    @property
    def pipeline_keywords(self) -> dict[str, Any]:
        """The keywords of `par_pipeline.Pipeline`, and `schedule` and `microbatches`."""
        return dict(self.pipeline or {})

    @property
    def precision_keywords(self) -> dict[str, Any]:
        """The keywords of `par_precision.mixed`, `precision` among them."""
        given = self.precision if isinstance(self.precision, Mapping) else {"precision": self.precision}
        return {"precision": "fp32", "clip_norm": self.clip_norm, **given}

    @property
    def precision_name(self) -> str:
        """The name of the precision, such as "bf16"."""
        name: str = self.precision_keywords["precision"]
        return name

    @property
    def zero_keywords(self) -> dict[str, Any]:
        """The keywords of `par_zero.shard`, `stage` among them."""
        return {"stage": 0, **self.zero} if isinstance(self.zero, Mapping) else {"stage": self.zero}

    def zero_policy(self, name: str) -> dict[str, Any]:
        """Return the arguments of a policy of `par_zero.shard` that the user passed.

        Args:
            name: Keyword of `shard`: "precision", "overlap" or "update".
        """
        is_exact = self.numerics == "canonical" and name == "precision"
        exact = {"reduce_dtype": torch.float64, "reduce_op": "sum"} if is_exact else {}
        return {**exact, **self._own_policy(name)}

    def _own_policy(self, name: str) -> dict[str, Any]:
        given = self.zero_keywords.get(name)
        if given is None or isinstance(given, Mapping):
            return dict(given or {})
        return {each.name: value for each in fields(given) if (value := getattr(given, each.name)) != each.default}

    @property
    def handlers(self) -> Sequence[Mapping[str, Any]]:
        """The gradient handlers of the user, or the default; and behind them one that exact sums need."""
        exact = [{"type": "exact_partials"}] if self.numerics == "canonical" else []
        return [*(self.gradient_handlers or DEFAULT), *exact]

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        stage: int = self.zero_keywords["stage"]
        return stage

    @property
    def shards(self) -> bool:
        """Whether par-zero averages gradients, rather than a gradient handler of the user's."""
        return any(kind == DATA_PARALLEL for kind, _ in kinds_of(self.gradient_handlers or DEFAULT))

    def described(self) -> str:
        """A text that must be identical on all ranks."""
        policies = {name: self.zero_policy(name) for name in ("precision", "overlap", "update")}
        # Ranks may have different devices, such as cuda:0 and cuda:1.
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "device"}
        given["lanes"] = repr(self.canonical_lanes)
        given["zero"] = {**self.zero_keywords, **policies}
        given["plugins"] = [each if isinstance(each, str) else each.name for each in self.plugins]
        policy = policy_of(self.recompute)
        given["recompute"] = repr(policy) if isinstance(policy, Layers | Keep) else policy
        return repr(_plain(given))


def _plain(value: Any) -> Any:
    """Replace policies by their fields, and other objects by the names of their types: addresses differ by rank."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {"": type(value).__name__, **{each.name: getattr(value, each.name) for each in fields(value)}}
    if isinstance(value, Mapping):
        # Each rank may have a disk of its own, and hosts may have written the options in another order.
        return {key: _plain(value[key]) for key in sorted(value, key=str) if key != "path"}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    # A dtype has the same text on all ranks, and ranks with different ones would hang in their first collective.
    return value if isinstance(value, str | int | float | torch.dtype | None) else type(value).__name__
