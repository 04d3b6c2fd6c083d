"""The options of a strategy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from par_groups import ProcessGroups
from par_plan import read_budget
from par_precision import precision_of
from par_recompute import Keep, Layers

from .handlers import DATA_PARALLEL, DEFAULT, kinds_of
from .plugin import Plugin
from .recompute import policy_of


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of a strategy: the keywords of `Strategy`, whose documentation says what each of them means.

    Raises:
        ValueError, TypeError: A value that makes no sense.
    """

    parallel: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    zero: int | Mapping[str, Any] = 0
    clip_norm: float | None = None
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    mixed: Mapping[str, Any] = field(default_factory=dict)
    gradient_handlers: Sequence[Mapping[str, Any]] = DEFAULT
    plugins: Sequence[Plugin | str] = ()
    device: str = "auto"
    seed: int = 0
    groups: ProcessGroups | None = None
    name: str = ""
    recompute: Any = None
    memory: Mapping[str, Any] | None = None
    readers: Literal["one", "every"] = "one"

    def __post_init__(self) -> None:
        for name, given in (("plugins", self.plugins), ("gradient_handlers", self.gradient_handlers)):
            if isinstance(given, str) or not isinstance(given, Sequence):  # a string would be taken letter by letter
                raise TypeError(f"{name}={given!r}: it must be a list; pass {name}=[{given!r}]")
        precision_of(self.precision)
        policy_of(self.recompute)
        read_budget(self.memory)
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"zero is {self.stage!r}; it can be 0, 1, 2 or 3")
        if self.readers not in ("one", "every"):
            raise ValueError(f"readers is {self.readers!r}; it can be 'one' or 'every'")
        own = sorted({"loss_fn", "weight", "shared"} & set(self.pipeline))
        if own:
            raise ValueError(f"pipeline has {own[0]!r}, which a strategy sets itself; leave it out")
        autocast = precision_of(self.precision).autocast
        if self.stage == 3 and autocast is not None and "param_dtype" not in self.zero_keywords:
            raise ValueError(
                f"zero is 3 with precision {self.precision!r}, which would keep a cast copy of every weight until "
                f"backward; use precision {self.precision.removesuffix('-amp')!r}, whose weights are gathered in 16 "
                "bits, or zero=2"
            )
        if self.groups is not None and self.parallel:
            raise ValueError(f"parallel is {dict(self.parallel)} and groups are given; give one of them")
        if self.stage and not self.shards:
            raise ValueError(
                f"zero is {self.stage}, which reduces gradients itself, but gradient_handlers leave out "
                f"{DATA_PARALLEL!r}; add it, or use zero=0"
            )

        if self.memory is not None and "offload" in self.zero_keywords:
            raise ValueError(f"memory is {dict(self.memory)}, and zero has an offload of its own; give one of them")
        if self.memory is not None and not self.shards:
            raise ValueError(
                f"memory is {dict(self.memory)}, but gradient_handlers leave out {DATA_PARALLEL!r}, which keeps "
                "what lies elsewhere; add it, or leave memory out"
            )

    @property
    def zero_keywords(self) -> dict[str, Any]:
        """The keywords of `par_zero.shard`."""
        return {"stage": 0, **self.zero} if isinstance(self.zero, Mapping) else {"stage": self.zero}

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        stage: int = self.zero_keywords["stage"]
        return stage

    @property
    def shards(self) -> bool:
        """Whether par-zero averages gradients, and not a handler of the user's."""
        return any(kind == DATA_PARALLEL for kind, _ in kinds_of(self.gradient_handlers or DEFAULT))

    def described(self) -> str:
        """What all ranks must have alike, as text."""
        plugins = [each if isinstance(each, str) else each.name for each in self.plugins]
        again = policy_of(self.recompute)
        fields: tuple[Any, ...] = (self.precision, self.zero, self.clip_norm, self.pipeline, self.mixed, self.seed)
        fields += (self.name, self.memory, self.readers, repr(again) if isinstance(again, Layers | Keep) else again)
        return repr(_plain((self.parallel, *fields, self.gradient_handlers, plugins)))


def _plain(value: Any) -> Any:
    """The value without objects, whose addresses differ between ranks: their types stand for them."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__
