"""Low-rank adapters of peft around linears that are cut. Known by what they have; peft is not imported.

A wrapper holds `base_layer`, and in `lora_A` and `lora_B` the two linears of each adapter, by its name. Around a
Column, A is whole and B is cut as the base is. Around a Row, A is cut as the base is, and B is whole.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from .plans.plans import names_around
from .plans.styles import Column, DealtExperts, Partial, Row, SplitExperts, Style, Vocabulary, Whole


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
        """The rules of its parts.

        Args:
            style: The rule of the wrapper.
            enters: Whether its input is entered once for all Columns around, so that A has a partial gradient.
        """
        downs = [f"{self.name}.lora_A.{adapter}" for adapter in self.adapters]
        ups = [f"{self.name}.lora_B.{adapter}" for adapter in self.adapters]
        of_down, of_up = (Partial() if enters else Whole(), style) if isinstance(style, Column) else (style, Whole())
        return {self.base: style, **dict.fromkeys(downs, of_down), **dict.fromkeys(ups, of_up)}


def base_model(model: nn.Module) -> nn.Module:
    """The model inside a PeftModel; any other model itself."""
    getter = getattr(model, "get_base_model", None)
    is_peft = callable(getter) and hasattr(model, "active_peft_config")
    return getter() if is_peft else model  # type: ignore[misc]  # it is callable


def wrappers_of(modules: dict[str, nn.Module], rules: dict[str, Style]) -> dict[str, Wrapper]:
    """The wrappers that have a rule.

    Args:
        modules: The modules of the model, by name.
        rules: The style of each name.

    Raises:
        TypeError: An adapter is of a kind that cannot be cut.
    """
    found: dict[str, Wrapper] = {}
    for name, module in modules.items():
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            raise TypeError(f"{name!r} is trained whole beside its adapters (modules_to_save); leave that out")
        style = rules.get(name)
        if style is None or not isinstance(getattr(module, "base_layer", None), nn.Module):
            continue
        who = type(module).__name__
        if isinstance(style, (Vocabulary, SplitExperts, DealtExperts)) or (isinstance(style, Column) and style.gather):
            raise TypeError(
                f"{name!r} has an adapter ({who}) on an embedding, a head or experts, which cannot be cut; choose "
                "target_modules among the linears of the layers"
            )
        if not isinstance(style, (Column, Row)):
            continue
        if not _names(module, "lora_A"):
            raise TypeError(f"{name!r} has an adapter of the kind {who}, which cannot be cut; LoRA can")
        if _names(module, "lora_magnitude_vector") or (isinstance(style, Row) and style.split):
            raise TypeError(f"{name!r} has an adapter with DoRA, or around a Row that splits its input; use plain LoRA")
        found[name] = Wrapper(name, _names(module, "lora_A"))
    return found


def wrapper_around(name: str, wrappers: dict[str, Wrapper]) -> str | None:
    """The name of the wrapper that a module is a part of; None for one outside."""
    return next((around for around in names_around(name) if around in wrappers), None)


def _names(module: nn.Module, attribute: str) -> tuple[str, ...]:
    held: Any = getattr(module, attribute, None)
    return tuple(held.keys()) if isinstance(held, nn.ModuleDict) else ()
