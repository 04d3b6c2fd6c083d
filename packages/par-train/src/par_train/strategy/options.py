"""The options of a strategy, checked before anything communicates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from par_groups import ProcessGroups
from par_plan import read_budget
from par_precision import precision_of
from par_recompute import Keep, Layers

from .handlers import DATA_PARALLEL, DEFAULT, kinds_of
from .plugin import Plugin
from .settings import policy_of

_ZERO = ("stage", "units", "precision", "overlap", "offload", "update", "init", "expert_groups")
"""Keywords of `par_zero.shard` that a strategy passes on."""

_MOVED = {
    **{name: f"overlap=dict({name}=...)" for name in ("bucket", "inflight")},
    **{name: f"precision=dict({name}=...)" for name in ("param_dtype", "reduce_dtype")},
    **{name: f"update=dict({name}=...)" for name in ("elementwise", "atomic")},
    "reduce": "precision=dict(reduce_op=...)",
    "gathers": "overlap=dict(gather_group=...)",
    "tensor": "update=dict(tensor_group=...)",
    "fill": "init=dict(init_fn=...)",
    "device": "init=dict(device=...)",
    "others": "expert_groups=...",
}
"""Keywords that `par_zero.shard` had, and what replaces them."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The keywords of `Strategy`, checked and frozen; `Strategy` documents each of them.

    Raises:
        ValueError, TypeError: An option has a wrong value, or two options contradict each other.
    """

    parallel: Mapping[str, Any] | ProcessGroups = field(default_factory=dict)
    precision: str | Mapping[str, Any] = "fp32"
    zero: int | Mapping[str, Any] = 0
    clip_norm: float | None = None
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    recompute: Any = None
    memory: Mapping[str, Any] | None = None
    gradient_handlers: Sequence[Mapping[str, Any]] = DEFAULT
    plugins: Sequence[Plugin | str] = ()
    device: str = "auto"
    seed: int = 0
    broadcast_batches: bool = True

    def __post_init__(self) -> None:
        for name, given in (("plugins", self.plugins), ("gradient_handlers", self.gradient_handlers)):
            # A string is a sequence too: each of its letters would be looked up as a plugin.
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise TypeError(f"{name}={given!r}: it must be a list; pass {name}=[{given!r}]")
        policy_of(self.recompute)
        read_budget(self.memory)
        for key in self.zero_keywords:
            if key in _MOVED:
                raise ValueError(f"zero[{key!r}]: this option moved; pass zero=dict(..., {_MOVED[key]})")
            if key not in _ZERO:
                raise ValueError(f"zero[{key!r}]: par_zero.shard has no such option; use one of {', '.join(_ZERO)}")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.stage!r}: it must be 0, 1, 2 or 3; pass one of these")
        if not isinstance(self.broadcast_batches, bool):
            raise TypeError(f"broadcast_batches={self.broadcast_batches!r}: it must be a bool; pass True or False")
        own = sorted({"loss_fn", "weight", "shared"} & set(self.pipeline))
        if own:
            raise ValueError(f"pipeline={dict(self.pipeline)}: the strategy sets {own[0]!r} itself; remove it")
        name = self.precision_name
        is_autocast = precision_of(name).autocast is not None
        if self.stage == 3 and is_autocast and "param_dtype" not in self.zero_policy("precision"):
            raise ValueError(
                f"zero=3 with precision={name!r}: autocast would keep a cast copy of every weight until backward; use "
                f"precision={name.removesuffix('-amp')!r}, which gathers weights in 16 bits, or zero=2"
            )
        if self.stage and not self.shards:
            raise ValueError(
                f"zero={self.stage}: it reduces gradients itself, but gradient_handlers lacks {DATA_PARALLEL!r}; add "
                "it, or use zero=0"
            )
        if self.memory is not None and "offload" in self.zero_keywords:
            raise ValueError(f"memory={dict(self.memory)}: zero has an `offload` of its own; pass one of them")
        if self.memory is not None and not self.shards:
            raise ValueError(
                f"memory={dict(self.memory)}: gradient_handlers lacks {DATA_PARALLEL!r}, which does the offloading; "
                "add it, or remove memory"
            )

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
        given = self.zero_keywords.get(name)
        if given is None or isinstance(given, Mapping):
            return dict(given or {})
        return {each.name: value for each in fields(given) if (value := getattr(given, each.name)) != each.default}

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
        plugins = [each if isinstance(each, str) else each.name for each in self.plugins]
        policy = policy_of(self.recompute)
        zero = {**self.zero_keywords, **{name: self.zero_policy(name) for name in ("precision", "overlap", "update")}}
        given: tuple[Any, ...] = (self.parallel, self.precision, zero, self.clip_norm, self.pipeline, self.seed)
        given += (self.memory, self.broadcast_batches, repr(policy) if isinstance(policy, Layers | Keep) else policy)
        return repr(_plain((*given, self.gradient_handlers, plugins)))


def _plain(value: Any) -> Any:
    """Replace objects by the names of their types, since their addresses differ between ranks."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__
