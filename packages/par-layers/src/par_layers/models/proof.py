"""Check of a region's autograd graph, at its first forward: the plan must give full gradients.

Between a Column and a Row each rank has a part of the features, so a parameter that is used there has a partial
gradient. Without this check, a plan that omits such a parameter would give wrong gradients without an error.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from par_groups import sharding_of

from .._collectives import is_collective
from ..layers.parallel_layer import ParallelLayer


class Proof:
    """Nodes of autograd's graph at the inputs, Columns and Rows of a region.

    Args:
        name: Name of the module, for messages.
        closed: Whether the region copies its input once, so that all of the input's gradient must be partial.
    """

    def __init__(self, name: str, *, closed: bool) -> None:
        self.name, self.closed = name, closed
        self.entered: list[Any] = []
        self.columns: list[Any] = []
        self.rows: list[Any] = []

    def begin(self) -> None:
        """Clear the nodes of the last forward."""
        self.entered, self.columns, self.rows = [], [], []

    def enter(self, x: Tensor) -> Tensor:
        """Register an input of the region, and return a view of it."""
        # The view adds a node of its own to the graph, so that other uses of the same tensor do not count as inputs.
        x = x.view_as(x)
        self.entered.append(x.grad_fn)
        return x

    def check(self, module: nn.Module, output: Any) -> None:
        """Raise unless all gradients will be right.

        Args:
            module: The module.
            output: Output of its forward.

        Raises:
            ValueError: A parameter without a rule has a partial gradient. Or the module uses its input or the output of
                its Row in a way that the plan does not cover.
        """
        first = output if isinstance(output, Tensor) else output[0]
        rows, columns, entered = _nodes(self.rows), _nodes(self.columns), _nodes(self.entered)
        # A region without a Row ends at its output.
        ends = rows or _nodes([first.grad_fn])
        # Everything between the Columns and the Row, where ranks compute with different features.
        inside = _before(ends, stop=columns | entered)
        self._check_parameters(module, inside)
        if not entered or not rows:
            return
        if not self.closed:
            if entered & inside:
                raise ValueError(
                    f"the module {self.name!r} uses its input between its Columns and its Row, beside its Columns, and "
                    "that gradient would be a partial sum; leave its linears whole, without rules"
                )
            return
        around = entered & _before(_nodes([first.grad_fn]), stop=rows)
        between = rows & _before(columns, stop=entered)
        if around or between:
            what = "adds an input to its output" if around else "hands the output of its Row to a Column"
            raise ValueError(
                f"the module {self.name!r} {what}, so its gradients would be sums of partial and of whole ones; give "
                f"{self.name!r} itself the rule 'replicate' in the plan, and each of its Columns copies its own input"
            )

    def _check_parameters(self, module: nn.Module, inside: set[Any]) -> None:
        used = {id(node.variable) for node in inside if hasattr(node, "variable")}
        for path, child in module.named_modules(prefix=self.name):
            for name, parameter in child.named_parameters(path, recurse=False):
                record = sharding_of(parameter)
                # A sharded parameter, or one whose gradient is summed over ranks later, is as it should be.
                # At ZeRO's stage 3 every parameter is sharded, and a rank may hold nothing of a small one.
                is_partial = not record.boxes or any(box.size != record.shape or box.sum_over for box in record.boxes)
                if id(parameter) in used and not is_partial and not isinstance(child, ParallelLayer):
                    raise ValueError(
                        f"parameter {name!r} is used between the sharded linears of {self.name!r} and has no rule, so "
                        "each rank would compute a part of its gradient; give its module the rule PartialGradient()"
                    )


def is_provable() -> bool:
    """Return whether autograd records a graph."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _nodes(found: Iterable[Any]) -> set[Any]:
    return {node for node in found if node is not None}


def _before(ends: Iterable[Any], stop: set[Any]) -> set[Any]:
    """Return the nodes from which `ends` were computed, up to the nodes in `stop` and up to collectives."""
    # Behind a collective, gradients are full again (`copy_to`) or the tensor belongs to another region.
    seen: set[Any] = set()
    waiting = [(node, True) for node in ends]
    while waiting:
        node, is_end = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in stop and (is_end or not is_collective(node)):
            waiting.extend((before, False) for before, _ in node.next_functions if before is not None)
    return seen
