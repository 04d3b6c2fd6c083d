"""LoRA adapters of peft around sharded linears. They are recognized by their attributes; peft is not imported.

A wrapper has the linear as `base_layer`, and the two linears of each adapter in `lora_A` and `lora_B`, by its name.
Around a column-parallel linear, A is replicated and B is sharded like the base. Around a row-parallel linear, A is
sharded like the base and B is replicated. The magnitudes of DoRA, one for each output feature, are sharded like B.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import attributes, set_sharding, whole

from ..modes.grid import Axes, Grid
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
        magnitudes: The names of its adapters that have magnitudes, as DoRA does.
    """

    name: str
    adapters: tuple[str, ...]
    magnitudes: tuple[str, ...] = ()

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
        # The magnitudes are a bare parameter, whose module is no linear.
        lengths = [f"{self.name}.lora_magnitude_vector.{adapter}.weight" for adapter in self.magnitudes]
        of_down, of_up = (
            (PartialGradient() if enters else Replicated(), style)
            if isinstance(style, ColumnParallel)
            else (style, Replicated())
        )
        of_parts = {**dict.fromkeys(downs, of_down), **dict.fromkeys(ups, of_up)}
        return {self.base: style, **of_parts, **(dict.fromkeys(lengths, of_up) if of_up is style else {})}


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
                f"{name!r} is {who} of the kind {tuner_of(module)}, which peft puts around a module without saying "
                "what it computes with this rank's heads; use LoRA"
            )
        style = rules.get(name)
        if style is None or not isinstance(getattr(module, "base_layer", None), nn.Module):
            continue
        is_linear = isinstance(style, (ColumnParallel, RowParallel))
        is_other = isinstance(style, (EmbeddingParallel, ExpertTensorParallel, ExpertParallel))
        # Modules that differ are told apart by their package: most tuners of peft call their wrapper `Linear`.
        tuner = tuner_of(module)
        if (is_linear or is_other) and tuner != "lora":
            raise TypeError(
                f"{name!r} has an adapter of the kind {tuner} ({who}), which tensor ranks cannot split; use LoRA, or "
                "train without tensor ranks"
            )
        if is_other or (isinstance(style, ColumnParallel) and style.gather):
            raise TypeError(
                f"{name!r} has an adapter ({who}) on an embedding, a head or experts, which cannot be cut; choose "
                "target_modules among the linears of the layers"
            )
        if not is_linear:
            continue
        if isinstance(style, RowParallel) and style.split:
            raise TypeError(f"{name!r} has an adapter around a Row that splits its input; choose other target_modules")
        magnitudes = _names(module, "lora_magnitude_vector")
        dropouts: Any = getattr(module, "lora_dropout", {})
        rate = max((getattr(dropouts[each], "p", 0.0) for each in magnitudes), default=0.0)
        if rate > 0:
            raise TypeError(
                f"{name!r} has DoRA with lora_dropout={rate}: it multiplies the full weight by the input again, of "
                "which a rank has a part; set lora_dropout=0, or use plain LoRA"
            )
        found[name] = Wrapper(name, _names(module, "lora_A"), magnitudes)
    return found


def adopt_magnitudes_(modules: dict[str, nn.Module], wrapper: Wrapper, style: Style, grid: Grid, axes: Axes) -> None:
    """Let DoRA compute the norms of full weights, of which this rank has a part, in place.

    Args:
        modules: The modules of the model, by name.
        wrapper: The linear with adapters.
        style: The rule of the linear.
        grid: This rank's coordinates.
        axes: Axes of the tensor group that have several ranks.
    """
    for adapter in wrapper.magnitudes:
        layer: Any = modules[f"{wrapper.name}.lora_magnitude_vector.{adapter}"]
        # peft multiplies an identity by both linears, which would communicate.
        layer.__dict__["get_lora_weight"] = _local_delta
        if isinstance(style, RowParallel):
            layer.__dict__["get_weight_norm"] = _NormOverRanks(grid, axes, transposed=layer.fan_in_fan_out)


def _local_delta(lora_A: nn.Module, lora_B: nn.Module, adapter_name: str | None = None) -> Tensor:  # noqa: N803 - peft's
    """Return this rank's part of B A, [outputs, inputs]."""
    del adapter_name
    down, up = lora_A.get_parameter("weight"), lora_B.get_parameter("weight")
    return up @ down


class _NormOverRanks:
    """Norm of each row of a weight whose columns are sharded. It replaces a method of peft's DoRA.

    Args:
        grid: This rank's coordinates.
        axes: Axes over which the columns are sharded.
        transposed: Whether the weight is [inputs, outputs].
    """

    def __init__(self, grid: Grid, axes: Axes, *, transposed: bool) -> None:
        self._grid, self._axes, self._transposed = grid, axes, transposed

    @torch.no_grad()  # DoRA treats the norms as constants
    def __call__(self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None) -> Tensor:
        """Return the norms, [outputs]. Collective: an all-reduce of as many numbers.

        Args:
            weight: This rank's columns of the weight.
            lora_weight: This rank's columns of B A, [outputs, inputs of this rank].
            scaling: Factor of B A.
            adapter_name: Name of the adapter; not used.
        """
        del adapter_name
        merged = (weight.T if self._transposed else weight) + scaling * lora_weight
        squares = merged.square().sum(1)
        dist.all_reduce(squares, group=self._grid.group(self._axes))
        return squares.sqrt()


def kind_of(model: Any) -> str:
    """Return the kind of adapter of a PeftModel, as peft names it, such as "LORA"; "" for any other model."""
    return str(getattr(getattr(model, "peft_type", None), "value", ""))


def check_kind(model: nn.Module) -> None:
    """Check that a model that is going to be split has no adapter that adds something of its own around its linears.

    Args:
        model: A PeftModel, or any other model.

    Raises:
        TypeError: The adapter adds keys and values of all heads, of which a rank has some, wraps complete layers, or
            has a classifier whose gradient each rank has a part of.
    """
    kind, who = kind_of(model), f"this {type(model).__name__}"
    if kind in ("PREFIX_TUNING", "CARTRIDGE"):
        raise TypeError(
            f"{who} adds keys and values for all heads ({kind}), of which a tensor rank has some; use LoRA or prompt "
            "tuning"
        )
    if kind == "SHADOW":
        raise TypeError(f"{who} wraps complete layers ({kind}), in which no plan finds the linears; use LoRA")
    if kind == "XLORA":
        raise TypeError(
            f"{who} scales adapters by a classifier ({kind}), of whose gradient a tensor rank has a part; use LoRA"
        )


def replicate_prompts_(model: nn.Module, grid: Grid) -> None:
    """Attach sharding metadata to the parameters of a PeftModel around its sharded model, such as prompts.

    They are replicated, and their gradients are full: the first layer copies its input to all ranks.

    Args:
        model: A PeftModel whose base model is sharded.
        grid: This rank's coordinates.
    """
    for parameter in model.parameters():
        if not attributes.SHARDING.is_on(parameter):
            set_sharding(parameter, whole(parameter.shape, grid.copies(())))


def tuner_of(module: nn.Module) -> str:
    """Return the kind of a module with a `base_layer` by its package in peft: "lora", "oft", "vblora" and so on."""
    _, _, inside = type(module).__module__.partition("peft.tuners.")
    if _names(module, "lora_A") and not inside:
        return "lora"  # the attributes decide for classes of others
    return inside.split(".")[0] or type(module).__name__


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
