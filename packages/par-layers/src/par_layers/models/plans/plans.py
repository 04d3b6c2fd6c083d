"""Lookup of one style for every name by patterns: of a user's plan, a registered one, or the model's own."""

import difflib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from par_groups import Registry

from .full_features import gather_features
from .styles import (
    ColumnParallel,
    EmbeddingParallel,
    ExpertParallel,
    ExpertTensorParallel,
    LatentProjection,
    RowParallel,
    Style,
    style_of,
)

Rule = str | Style
Plan = Mapping[str, Rule]
PlanFunction = Callable[[Any], Plan]

PLANS: Registry[PlanFunction] = Registry("plan", "par_layers.plans")


def register_plan(model_type: str) -> Callable[[PlanFunction], PlanFunction]:
    """Register the plan of a family of models, as a decorator on a function from the model's config to its plan.

    The patterns are names in the base model, such as "layers.*.mlp.up_proj"; "auto" puts the base model's own name in
    front. Another wheel can provide it by an entry point in the group `par_layers.plans`.

    Args:
        model_type: The `model_type` of the family's config.

    Raises:
        ValueError: The family has a registered plan.

    Example:
        @register_plan("mpt")
        def mpt(config: Any) -> Plan:
            unit = config.d_model // config.n_heads
            qkv = ColumnParallel(blocks=3, unit=unit)
            return {"blocks.*.attn.Wqkv": qkv, "blocks.*.attn.out_proj": RowParallel(), ...}
    """

    def register(function: PlanFunction) -> PlanFunction:
        PLANS.register(model_type, function)
        return function

    return register


@dataclass(frozen=True)
class Resolved:
    """A plan, resolved for one model.

    Args:
        rules: The style of each module or parameter that has one, by its name.
        unmatched: Patterns of the model's own plan that match nothing, as of layers that this size of it lacks.
    """

    rules: dict[str, Style]
    unmatched: tuple[str, ...]


def resolve(model: nn.Module, plan: str | Plan, *, experts: bool = False) -> Resolved:
    """Return the style of each module and parameter of a model.

    Args:
        model: The model, which may be on the meta device.
        plan: "auto", or rules by pattern, in which `*` stands for one number between dots.
        experts: Whether the topology deals experts out, so that "auto" takes the model's plan for that, too.

    Raises:
        TypeError: The plan is "auto" and the model has none, or it matches nothing; or a rule is no style.
        ValueError: A rule of the user's matches nothing or what another one matches, or a style is unknown.
    """
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(f"plan is {plan!r}; it is 'auto', or a dict such as {{'layers.*.mlp.up': 'colwise'}}")
        return _with_latents(_resolve_auto(model, experts=experts), model)
    names = _names(model)
    rules: dict[str, Style] = {}
    pattern_of: dict[str, str] = {}
    for pattern, rule in plan.items():
        matched = _matching(pattern, names)
        if not matched:
            raise ValueError(f"the plan's rule {pattern!r} matches nothing in the model; {_nearest(pattern, names)}")
        for name in matched:
            if name in rules:
                raise ValueError(
                    f"{name!r} is matched by two rules of the plan, {pattern_of[name]!r} and {pattern!r}; leave one"
                )
            rules[name], pattern_of[name] = style_of(rule, names[name], name), pattern
    if not rules:
        raise TypeError("the plan has no rules; give at least one, such as {'layers.*.mlp.up': 'colwise'}")
    return _with_latents(Resolved(rules, ()), model)


def _with_latents(resolved: Resolved, model: nn.Module) -> Resolved:
    """Return the plan with the number of features that bypass a Column, if a rule reads it from the config.

    A linear has no config; the attention around it has one, or the number itself.

    Raises:
        ValueError: Neither says the number.
    """
    rules = dict(resolved.rules)
    for name, style in rules.items():
        if isinstance(style, LatentProjection) and not style.around:
            around = next(filter(None, _rope_features(model, name)), 0)
            if not around:
                raise ValueError(
                    f"the rule of {name!r} is 'mla_kv_a_proj', but neither a module around it nor the config has "
                    "`qk_rope_head_dim`; pass rules with PartialGradient(before=True) for the low-rank projections"
                )
            rules[name] = LatentProjection(around)
    return Resolved(rules, resolved.unmatched)


def _rope_features(model: nn.Module, name: str) -> Iterator[int]:
    """Yield `qk_rope_head_dim` of the modules around a linear, from the innermost, and then of their configs.

    0 if missing.
    """
    holders = [model.get_submodule(path) for path in names_around(name)]
    for holder in (*holders, *(getattr(each, "config", None) for each in holders)):
        number = getattr(holder, "qk_rope_head_dim", None)
        yield number if isinstance(number, int) else 0


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is a Hugging Face Transformers model, without importing transformers."""
    # If nobody has imported transformers, the model is of none of its classes.
    transformers = sys.modules.get("transformers")
    base = None if transformers is None else getattr(transformers, "PreTrainedModel", None)
    return base is not None and isinstance(model, base)


def input_embedding(model: nn.Module) -> nn.Module | None:
    """Return the embedding of the ids of a Transformers model."""
    return _embedding(model, "get_input_embeddings")


def output_embedding(model: nn.Module) -> nn.Module | None:
    """Return the linear that computes a Transformers model's logits over the vocabulary."""
    return _embedding(model, "get_output_embeddings")


def name_of(module: nn.Module, model: nn.Module) -> str:
    """Return the name of a module in a model."""
    names: list[str] = [name for name, candidate in model.named_modules() if candidate is module]
    return names[0]


def names_around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module or parameter, from the innermost to the model's, which is ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _embedding(model: nn.Module, getter: str) -> nn.Module | None:
    if not is_transformers_model(model):
        return None
    try:
        found = getattr(model, getter)()
    except NotImplementedError:  # how transformers says that there is none
        return None
    inside = getattr(found, "base_layer", found)  # where an adapter is around it, which has the rule then
    return found if isinstance(inside, (nn.Embedding, nn.Linear)) else None


def _resolve_auto(model: nn.Module, *, experts: bool) -> Resolved:
    """Return the rules of plan "auto": the family's registered plan or the model's own, its experts, and both ends."""
    if not is_transformers_model(model):
        raise TypeError(
            f"plan 'auto' is for models of transformers, and this is a {type(model).__name__}; give a plan, such as "
            "{'layers.*.mlp.up': 'colwise', 'layers.*.mlp.down': 'rowwise'}"
        )
    of_experts: Plan = (getattr(model, "ep_plan", None) or {}) if experts else {}
    # Experts whose rows travel have rules of their own, which replace those that shard every expert.
    plan = {**_plan_of(model, is_needed=not of_experts), **of_experts}
    names = _names(model)
    rules: dict[str, Style] = {}
    unmatched = []
    for pattern, rule in plan.items():
        matched = _matching(pattern, names)
        if not matched:
            # This is no error: the plan of a family covers all its sizes, and this size may lack some layers.
            unmatched.append(pattern)
        for name in matched:
            rules.setdefault(name, style_of(rule, names[name], name))
    if not rules:
        raise TypeError(
            f"no rule of the plan of {type(model).__name__} matches anything in the model ({', '.join(unmatched)}); "
            "give a plan"
        )
    both = ((input_embedding(model), EmbeddingParallel()), (output_embedding(model), ColumnParallel(gather=True)))
    rules.update({name_of(module, model): style for module, style in both if module is not None})
    return Resolved(gather_features(rules, names), tuple(unmatched))


def warn_if_layers_stay_full(model: nn.Module, resolved: Resolved) -> None:
    """Warn if a model's own plan shards no layer of it, because then tensor ranks save hardly any memory or time.

    Args:
        model: Hugging Face Transformers model.
        resolved: Styles of plan "auto" for several tensor ranks.
    """
    ends = [name_of(module, model) for module in (input_embedding(model), output_embedding(model)) if module]
    cutting = (ColumnParallel, RowParallel, ExpertTensorParallel, ExpertParallel)
    if not any(isinstance(style, cutting) for name, style in resolved.rules.items() if name not in ends):
        warnings.warn(
            f"plan='auto': the plan of {type(model).__name__} shards no layer, only {', '.join(map(repr, ends))}, so "
            "every tensor rank holds all layers; pass a plan, such as {'layers.*.mlp.up': 'colwise', "
            "'layers.*.mlp.down': 'rowwise'}",
            stacklevel=4,
        )


def _plan_of(model: nn.Module, *, is_needed: bool) -> Plan:
    """Return the plan of a model for its tensor ranks; an empty plan if the model has none and needs none."""
    config: Any = getattr(model, "config", None)
    family = str(getattr(config, "model_type", ""))
    if family in PLANS:
        prefix = getattr(model, "base_model_prefix", "")
        prefix = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
        return {prefix + pattern: rule for pattern, rule in PLANS[family](config).items()}
    release = getattr(sys.modules["transformers"], "__version__", "0")
    if tuple(int(part) for part in re.findall(r"\d+", release)[:2]) < (5, 4):
        raise TypeError(
            f"plans of transformers {release} leave some gradients partial without a word, those of norms of queries "
            "and keys; update to 5.4 or later, or give a plan"
        )
    plan: Plan | None = getattr(model, "tp_plan", None)
    if not plan and is_needed:
        raise TypeError(
            f"{type(model).__name__} has no plan for tensor parallelism; give one, such as "
            "{'layers.*.mlp.up': 'colwise', 'layers.*.mlp.down': 'rowwise'}, or register it with register_plan"
        )
    return plan or {}


def _names(model: nn.Module) -> dict[str, nn.Module]:
    """Return every name that a rule may match.

    The value is the module with that name, or the module that owns the parameter with that name.
    """
    names: dict[str, nn.Module] = {}
    # A shared module has several names, and a rule may use any of them.
    for path, module in model.named_modules(remove_duplicate=False):
        names[path] = module
        for parameter, _ in module.named_parameters(recurse=False):
            names[f"{path}.{parameter}" if path else parameter] = module
    del names[""]
    return names


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    # As in the plans of transformers, `*` is the number of a layer.
    matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
    return [name for name in names if matches(name)]


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """Return the end of a message: the names that are most similar to the pattern, with `*` for numbers."""
    generic = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name) for name in names))
    near = difflib.get_close_matches(pattern, generic, n=3, cutoff=0.4)
    return f"the nearest names are {', '.join(map(repr, near))}" if near else f"its names are like {generic[:3]}"
