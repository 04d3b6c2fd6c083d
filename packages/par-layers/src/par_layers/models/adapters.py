"""LoRA adapters of peft around sharded linears. They are recognized by their attributes; peft is not imported.

A wrapper has the linear as `base_layer`, and the two linears of each adapter in `lora_A` and `lora_B`, by its name.
Around a column-parallel linear, A is replicated and B is sharded like the base. Around a row-parallel linear, A is
sharded like the base and B is replicated.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from .plans.plans import names_around
from .plans.styles import (
    ColumnParallel,
    EmbeddingParallel,
    ExpertParallel,
    ExpertTensorParallel,
    PartialGradient,
    Replicated,
    RowParallel,
    Style,
)


@dataclass(frozen=True)
class Wrapper:
    """A linear with adapters around it.

    Args:
        name: The name of the wrapper in the model.
        adapters: The names of its adapters.
    """

    name: str
    adapters: tuple[str, ...]

    @property
    def base(self) -> str:
        """The name of the linear inside."""
        return f"{self.name}.base_layer"

    def rules(self, style: Style, *, enters: bool) -> dict[str, Style]:
        """Return the rules of the wrapper's parts.

        Args:
            style: The rule of the wrapper.
            enters: Whether its input is entered once for all Columns around, so that A has a partial gradient.
        """
        downs = [f"{self.name}.lora_A.{adapter}" for adapter in self.adapters]
        ups = [f"{self.name}.lora_B.{adapter}" for adapter in self.adapters]
        # B computes the gradient of A's output from this rank's features only. If the region has no entry that sums
        # it, B's copy of its own input does, and A's gradient is full.
        of_down, of_up = (
            (PartialGradient() if enters else Replicated(), style)
            if isinstance(style, ColumnParallel)
            else (style, Replicated())
        )
        return {self.base: style, **dict.fromkeys(downs, of_down), **dict.fromkeys(ups, of_up)}


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside a PeftModel; any other model unchanged."""
    getter = getattr(model, "get_base_model", None)
    is_peft = callable(getter) and hasattr(model, "active_peft_config")
    return getter() if is_peft else model  # type: ignore[misc]  # it is callable


def wrappers_of(modules: dict[str, nn.Module], rules: dict[str, Style]) -> dict[str, Wrapper]:
    """Return the wrappers that have a rule.

    Args:
        modules: The modules of the model, by name.
        rules: The style of each name.

    Raises:
        TypeError: An adapter is of a kind that cannot be cut.
    """
    found: dict[str, Wrapper] = {}
    # The rule may be on the module, on a part of it, or on a module around it.
    ruled = {owner for name in rules for owner in (name, *names_around(name))}
    for name, module in modules.items():
        who = type(module).__name__
        if isinstance(module, nn.Module) and _is_trained_whole(module):
            # peft holds the original module and a trained copy, and the plan would shard only one of them.
            if name in ruled or any(owner in rules for owner in names_around(name)):
                raise TypeError(
                    f"{name!r} is trained in full next to its adapters (modules_to_save, or the head that peft adds "
                    "for the task_type), but the plan shards it; remove it from modules_to_save, or use a plan without "
                    "a rule for it"
                )
        elif _is_of_peft(module) and not _is_in_peft(name, modules):
            raise TypeError(
                f"{name!r} is {who}, which peft puts around a module without saying what it computes with this rank's "
                "heads; use LoRA"
            )
        style = rules.get(name)
        if style is None or not isinstance(getattr(module, "base_layer", None), nn.Module):
            continue
        if isinstance(style, (EmbeddingParallel, ExpertTensorParallel, ExpertParallel)) or (
            isinstance(style, ColumnParallel) and style.gather
        ):
            raise TypeError(
                f"{name!r} has an adapter ({who}) on an embedding, a head or experts, which cannot be cut; choose "
                "target_modules among the linears of the layers"
            )
        if not isinstance(style, (ColumnParallel, RowParallel)):
            continue
        if not _names(module, "lora_A"):
            raise TypeError(f"{name!r} has an adapter of the kind {who}, which cannot be cut; LoRA can")
        if _names(module, "lora_magnitude_vector") or (isinstance(style, RowParallel) and style.split):
            raise TypeError(f"{name!r} has an adapter with DoRA, or around a Row that splits its input; use plain LoRA")
        found[name] = Wrapper(name, _names(module, "lora_A"))
    return found


def check_prompts(model: nn.Module) -> None:
    """Check that a PeftModel adds no keys and values of its own to attentions that are going to be cut.

    Args:
        model: A PeftModel, or any other model.

    Raises:
        TypeError: It does, as prefix tuning: they are those of all heads, and a rank has some of them.
    """
    config = getattr(model, "active_peft_config", None) if base_model(model) is not model else None
    kind = str(getattr(getattr(config, "peft_type", None), "value", ""))
    if kind in ("PREFIX_TUNING", "CARTRIDGE"):
        raise TypeError(
            f"this {type(model).__name__} adds keys and values for all heads ({kind}), of which a tensor rank has "
            "some; use LoRA or prompt tuning"
        )


def _is_of_peft(module: nn.Module) -> bool:
    """Return whether a module is a replacement by peft for a module other than a linear or a norm."""
    return type(module).__module__.startswith("peft.tuners.") and "base_layer" not in module._modules


def _is_in_peft(name: str, modules: dict[str, nn.Module]) -> bool:
    """Return whether a module is a part of one of peft's modules."""
    return any(type(modules[owner]).__module__.startswith("peft.") for owner in names_around(name))


def _is_trained_whole(module: nn.Module) -> bool:
    """Return whether peft trains a copy of a module, as for `modules_to_save` and for the head of a classifier."""
    inside = module._modules
    return "modules_to_save" in inside and "original_module" in inside


def wrapper_around(name: str, wrappers: dict[str, Wrapper]) -> str | None:
    """Return the name of the wrapper that contains a module; None for a module outside of wrappers."""
    return next((around for around in names_around(name) if around in wrappers), None)


def _names(module: nn.Module, attribute: str) -> tuple[str, ...]:
    held: Any = getattr(module, attribute, None)
    return tuple(held.keys()) if isinstance(held, nn.ModuleDict) else ()
