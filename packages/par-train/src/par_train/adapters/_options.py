"""The argument of all adapters: the keywords of a `Strategy`, or an existing one."""

from collections.abc import Mapping, Sequence
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
    precision: str,
    said_by: str,
    names: Mapping[str, str] = AUTOCAST,
    device: str = "auto",
    seed: int = 0,
) -> Strategy:
    """Return the strategy that an adapter runs on.

    Args:
        given: The keywords of a Strategy, an existing one, or None for data parallelism.
        precision: The trainer's precision, one of `names`.
        said_by: The trainer's argument, for the error, such as "TrainingArguments(bf16=True)".
        names: The precisions of par-precision by the trainer's names; the first one is the trainer's default.
        device: A device, or "auto".
        seed: The trainer's seed, which a seed in the keywords overrides.

    Raises:
        ValueError: A precision without a counterpart, or two precisions; or as `Strategy`.
    """
    if precision not in names:
        raise ValueError(
            f"{said_by} asks for {precision!r}, and with a strategy it can be one of {', '.join(names)}; leave it out "
            "and give the strategy a precision of par-precision, such as precision='fp8'"
        )
    says_its_own = isinstance(given, Strategy) or "precision" in (given or {})
    if says_its_own and precision != next(iter(names)):
        own = said(given, "precision")
        raise ValueError(f"{said_by} and the strategy's precision {own!r} both say how to compute; give one")
    if isinstance(given, Strategy):
        return given
    keywords = {"precision": names[precision], "seed": seed, **(given or {})}
    return Strategy(**keywords, device=device)


def initialize(strategy: Strategy, objects: Sequence[Any], instead: str | None) -> list[Any]:
    """Initialize models and optimizers, and return a list of them. Collective.

    Args:
        strategy: The strategy.
        objects: Models and optimizers.
        instead: For a loop that calls models: what to use for a pipeline, whose stages cannot be called; else None.

    Raises:
        ValueError: The strategy has a pipeline, and the loop calls models; or as `Strategy.initialize`.
    """
    if strategy.schedule is not None and instead is not None:
        raise ValueError(
            f"the strategy has a pipeline, whose stages no loop calls as a model; {instead}, or use "
            "Strategy.execute_pipeline in a loop of your own"
        )
    given = strategy.initialize(*objects)
    return [given] if len(objects) == 1 else list(given)


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
