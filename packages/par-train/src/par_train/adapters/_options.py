"""What all adapters are given: the keywords of a `Strategy`, or one that is there already."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from par_groups import ProcessGroups

from ..strategy.plugin import Plugin
from ..strategy.strategy import Strategy


class StrategyKeywords(TypedDict, total=False):
    """The keywords of `Strategy` that an adapter's user says; the rest is what the trainer says."""

    parallel: Mapping[str, Any] | ProcessGroups
    precision: str | Mapping[str, Any]
    zero: int | Mapping[str, Any]
    clip_norm: float | None
    pipeline: Mapping[str, Any]
    recompute: Any
    memory: Mapping[str, Any] | None
    gradient_handlers: Sequence[Mapping[str, Any]]
    plugins: Sequence[Plugin | str]
    seed: int
    broadcast_batches: bool


AUTOCAST = {"no": "fp32", "bf16": "bf16-amp", "fp16": "fp16-amp"}
"""What trainers call mixed precision, which is autocast over fp32 weights, by the names of par-precision."""


def said(given: StrategyKeywords | Strategy | None, name: str) -> Any:
    """What the keywords of a Strategy, or one that is there, say of an option; None: nothing."""
    return getattr(given.options, name) if isinstance(given, Strategy) else (given or {}).get(name)


def make_strategy(
    given: StrategyKeywords | Strategy | None,
    *,
    mixed_precision: str,
    said_by: str,
    device: str = "auto",
    seed: int = 0,
) -> Strategy:
    """The strategy that an adapter runs on.

    Args:
        given: The keywords of a Strategy, one that is there, or None for data parallelism.
        mixed_precision: What the trainer says of precision: "no", "bf16" or "fp16".
        said_by: How it says so, for the error, such as "TrainingArguments(bf16=True)".
        device: A device, or "auto".
        seed: The trainer's seed, unless the keywords say one.

    Raises:
        ValueError: A precision that has no counterpart, or that is said twice; or what `Strategy` refuses.
    """
    if mixed_precision not in AUTOCAST:
        raise ValueError(
            f"{said_by} asks for {mixed_precision!r}, which is none of {', '.join(AUTOCAST)}; leave it out and give "
            "the strategy a precision, such as strategy=dict(precision='fp8')"
        )
    says_its_own = isinstance(given, Strategy) or "precision" in (given or {})
    if says_its_own and mixed_precision != "no":
        precision = said(given, "precision")
        raise ValueError(f"{said_by} and the strategy's precision {precision!r} both say how to compute; give one")
    if isinstance(given, Strategy):
        return given
    keywords: StrategyKeywords = {"precision": AUTOCAST[mixed_precision], "seed": seed, **(given or {})}
    return Strategy(**keywords, device=device)


def missing(adapter: str, package: str, extra: str) -> ImportError:
    """The error of an adapter whose package is not installed.

    Args:
        adapter: Name of the adapter's module in `par_train.adapters`.
        package: What could not be imported.
        extra: The extra of par-train that installs it.
    """
    return ImportError(
        f"par_train.adapters.{adapter} needs {package}, which is not installed; the extra par-train[{extra}] has it"
    )
