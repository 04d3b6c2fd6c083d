"""Regions whose code needs all features or heads at once between a ColumnParallel and a RowParallel linear.

A model's own plan may shard the linears of such a region anyway: a norm over all heads then meets the heads of one
rank, which raises an error, and a mean over the features of an MLP is a mean of one rank's features, which raises none.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from .styles import ColumnParallel, PartialGradient, RowParallel, Style

REDUCES = frozenset(
    {"mean", "std", "var", "norm", "softmax", "topk", "sum", "amax", "amin", "cumsum", "sort", "median"}
)
"""Names of functions that combine the features of a token."""


def gather_features(rules: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Return a plan in which regions that need full features gather them, and split them again before their Rows.

    Args:
        rules: Style of each module and parameter, by name.
        modules: Modules, by name; the owner of each parameter by the parameter's name.
    """
    found = dict(rules)
    columns: dict[str, list[str]] = {}
    for name, style in rules.items():
        if isinstance(style, ColumnParallel) and not style.gather and isinstance(modules[name], nn.Linear):
            columns.setdefault(name.rpartition(".")[0], []).append(name)
    for owner, of_owner in columns.items():
        module = modules.get(owner)
        if module is None or not (needed := _needs_full(module, owner, of_owner, rules, modules)):
            continue
        for name, style in rules.items():
            if not name.startswith(f"{owner}."):
                continue
            if isinstance(style, ColumnParallel) and isinstance(modules[name], nn.Linear):
                # Gathered features are in the order of ranks, which is that of the weight only if it has one block.
                found[name] = replace(style, gather=True, blocks=1)
            elif isinstance(style, RowParallel):
                found[name] = replace(style, split=True, blocks=1)
            elif name in needed:  # its input is full, so that its gradient is no partial sum
                del found[name]
    return found


def _needs_full(
    region: nn.Module, owner: str, columns: list[str], rules: Mapping[str, Style], modules: Mapping[str, nn.Module]
) -> set[str]:
    """Return the names of what needs the full features of a region's Columns; the region's own name for its code."""
    head = getattr(region, "head_dim", None)
    if not isinstance(head, int):
        is_pure = next(region.parameters(recurse=False), None) is None
        return {owner} if is_pure and _names(region) & REDUCES else set()
    widths = {each.out_features for name in columns if isinstance(each := modules[name], nn.Linear)}
    heads = {width // head for width in widths if width % head == 0 and width > head}
    needed = set()
    for path, module in region.named_modules(prefix=owner):
        for name, parameter in module.named_parameters(recurse=False):
            style = rules.get(f"{path}.{name}", rules.get(path))
            if style is not None and (not isinstance(style, PartialGradient) or style.before):
                continue
            is_norm = "Norm" in type(module).__name__ and parameter.dim() == 1
            # A norm over one head works on any rank's heads. A norm over all heads needs all of them.
            if is_norm and len(parameter) in widths and len(parameter) > head:
                needed.add(path)
            # One number for each head, of which a rank has some: the code would combine them with all numbers.
            elif not is_norm and not isinstance(module, nn.Linear) and heads & set(parameter.shape):
                needed.add(f"{path}.{name}")
    return needed


def _names(module: nn.Module) -> set[str]:
    """Return the names in the code of a module's forward, and in the methods of its class that the forward calls."""
    found: set[str] = set()
    waiting, seen = ["forward"], set[str]()
    while waiting:
        method = waiting.pop()
        code = getattr(inspect.unwrap(getattr(type(module), method)), "__code__", None)
        if code is None or method in seen:
            continue
        seen.add(method)
        found.update(code.co_names)
        waiting += [each for each in code.co_names if inspect.isfunction(vars(type(module)).get(each))]
    return found
