"""The argument of all adapters: the keywords of a `Strategy`, or an existing one."""

from collections.abc import Mapping
from typing import Any

from ..strategy.strategy import Strategy

AUTOCAST = {"no": "fp32", "bf16": "bf16-amp", "fp16": "fp16-amp"}
"""The precisions of par-precision by trainers' names of mixed precision: autocast over fp32 weights."""


def said(given: Mapping[str, Any] | Strategy | None, name: str) -> Any:
    """Return the value of an option in the keywords of a Strategy, or of an existing one; None if it is not given."""
    return getattr(given.options, name) if isinstance(given, Strategy) else (given or {}).get(name)


def make_strategy(
    given: Mapping[str, Any] | Strategy | None,
    *,
    mixed_precision: str,
    said_by: str,
    device: str = "auto",
    seed: int = 0,
) -> Strategy:
    """Return the strategy that an adapter runs on.

    Args:
        given: The keywords of a Strategy, an existing one, or None for data parallelism.
        mixed_precision: The trainer's mixed precision: "no", "bf16" or "fp16".
        said_by: The trainer's argument, for the error, such as "TrainingArguments(bf16=True)".
        device: A device, or "auto".
        seed: The trainer's seed, which a seed in the keywords overrides.

    Raises:
        ValueError: A precision without a counterpart, or two precisions; or as `Strategy`.
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
    keywords = {"precision": AUTOCAST[mixed_precision], "seed": seed, **(given or {})}
    return Strategy(**keywords, device=device)


def missing(adapter: str, package: str, extra: str) -> ImportError:
    """Return the error of an adapter whose package is not installed.

    Args:
        adapter: Name of the adapter's module in `par_train.adapters`.
        package: The package that could not be imported.
        extra: The extra of par-train that installs it.
    """
    return ImportError(
        f"par_train.adapters.{adapter} needs {package}, which is not installed; the extra par-train[{extra}] has it"
    )
