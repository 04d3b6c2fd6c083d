"""A plan for the stages of a model that has none, found in its structure and checked by running it.

All stages run the code around the layers, but only one stage has the modules of that code. So a model can be split if
its layers form a chain, and if they receive the same arguments on all stages. A small copy of the model, in which
identities replace the layers, shows both: it runs once with token ids, and once as each kind of stage.
"""

import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import buffers_of, children_of, forward_hooks_of, forward_pre_hooks_of, parameters_of, tree_leaves
from .twins import EMBEDS, Absent, StagePlan, shallow, split, takes

ROWS, TIME, IDS = 5, 8, 10
FORMS = (1, 2, 3)
"""Numbers of values that a layer may return. `ROWS` is none of them: code must not unpack hidden states by rows."""


def find_plan(model: nn.Module) -> StagePlan:
    """Return a plan of a model's stages: the modules before and after its layers, and the layers.

    Args:
        model: A Hugging Face Transformers model on any device, also meta. It does not change.

    Raises:
        TypeError: The model cannot be split. The message has the reason.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    # A list inside of another list is part of a layer, such as a list of experts.
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    sizes = {name: sum(each.numel() for each in lists[name].parameters()) for name in outermost}
    tables = {name: each.weight.numel() for name, each in model.named_modules() if isinstance(each, nn.Embedding)}
    around = max(tables, key=lambda name: tables[name], default="").rpartition(".")[0]
    # The layers are next to the embedding of tokens. A trial of another list, such as an encoder's, would compute these
    # layers at their real sizes, for minutes.
    names = sorted(
        (name for name in outermost if sizes[name]),
        key=lambda name: (not name.startswith(f"{around}.".lstrip(".")), -sizes[name]),
    )
    if not names:
        raise TypeError(
            f"{type(model).__name__} has no _pp_plan and no nn.ModuleList of layers, so it cannot be split into "
            "stages; pass a list of layers, an nn.Sequential, or stages of your own"
        )
    with torch.no_grad():
        # The towers of a model that reads tokens alone do not run, so that their lists are no chains.
        trials: list[_StageTrial] = []
        for layers, values in product(names, FORMS):
            trials.append(_StageTrial(model, layers, values))
            if not trials[-1].problem:
                break
        found = trials[-1] if not trials[-1].problem else max(trials, key=lambda each: each.reached)
        problem = found.problem or found.problem_of_stages()
    if problem:
        raise TypeError(
            f"{type(model).__name__} has no complete _pp_plan, and its layers {found.layers!r} cannot be split into "
            f"stages: {problem}; train it without a pipeline, or pass stages of your own"
        )
    return found.plan


class _StageTrial:
    """Runs of a small copy of a model with identities in place of its layers.

    Args:
        model: The model.
        layers: Name of its list of layers.
        values: Number of values that each layer returns.

    Attributes:
        plan: The plan, if the layers form a chain.
        problem: The reason why they do not; otherwise empty.
        reached: Number of layers that ran before there was a problem.
    """

    def __init__(self, model: nn.Module, layers: str, values: int) -> None:
        self.layers, self.problem = layers, ""
        self.plan: StagePlan = {layers: (["hidden_states"], ["hidden_states"] * values)}
        self._seen = CallRecorder()
        self._copy = small_copy(model, layers, self._seen.in_place_of(model.get_submodule(layers), values))
        around = dict(_around(self._copy, layers))
        moments: dict[str, set[int]] = {name: set() for name in around}
        for name, module in around.items():
            for each in module.modules():
                each.register_forward_hook(lambda *_, name=name: moments[name].add(len(self._seen.calls)))
        self._ids = torch.arange(ROWS * TIME).view(ROWS, TIME) % IDS
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        if isinstance(padding, int):
            # A classifier looks for padding in token ids to find the last token of a row, and later stages have none.
            self._ids[0, -2:] = padding
        outputs = self._run(
            self._copy, input_ids=self._ids, **({"use_cache": False} if takes(self._copy, "use_cache") else {})
        )
        self._whole, self._logits, self.reached = self._seen.calls, outputs, len(self._seen.calls)
        self.problem = self.problem or self._problem_of_chain(moments)

    def problem_of_stages(self) -> str:
        """Run the model as its first, a middle and its last stage; return the difference to the full model."""
        for name, run in kinds_of_stages(self._seen.count):
            (stage,) = split(self._copy, self.plan, self.layers, [run])
            entered = self._ids if name == "first" else self._seen.hidden
            output = self._run(stage, entered)
            if self.problem:
                return f"on the {name} stage, {self.problem}"
            if difference := self._seen.difference(self._whole[run.start : run.stop]):
                return f"on the {name} stage, {difference}"
            if not _is_equal(output, self._logits if name == "last" else self._seen.hidden):
                return f"the {name} stage returns other values than the full model"
        return ""

    def _run(self, model: nn.Module, *args: Any, **keywords: Any) -> Any:
        """Return the first output of a model, or set `problem`."""
        self._seen.calls = []
        try:
            output = model(*args, **keywords)
        except Exception as error:  # the code of a model may raise anything
            self.problem = (
                f"its code lacks values, such as token ids ({line_of(error, model)} raises {type(error).__name__})"
            )
            return None
        return output if isinstance(output, Tensor) else output[0]

    def _problem_of_chain(self, moments: dict[str, set[int]]) -> str:
        """Return why the layers are no chain, and complete the plan with the modules around them."""
        count, calls = self._seen.count, self._seen.calls
        if [call.number for call in calls] != [*range(count)]:
            return "they do not run once each, in their order"
        if any(call.has_other for call in calls):
            return "a layer receives more than hidden states from the layer before"
        if any(call.hidden is not self._seen.hidden for call in calls[1:]):
            return "the model changes hidden states between them"
        before: StagePlan = {}
        for name, when in moments.items():
            if when == {0}:
                before[name] = (["input_ids"], [EMBEDS])
            elif when == {count}:
                self.plan[name] = (["hidden_states"], ["hidden_states"])
            elif when:
                return f"{name!r} runs between them, or before and after them"
        self.plan = {**before, **self.plan}
        return ""


class LayerCall:
    """The arguments of one call of a layer.

    Args:
        number: Position of the layer.
        hidden: The hidden states.
        others: All other arguments, by position or name.
    """

    def __init__(self, number: int, hidden: Any, others: dict[str, Any]) -> None:
        self.number, self.hidden, self.others = number, hidden, others

    @property
    def has_other(self) -> bool:
        """Whether an argument is a value that a layer returned in addition to hidden states."""
        return any(isinstance(each, _OtherValue) for each in tree_leaves(self.others))

    def difference(self, call: "LayerCall") -> str:
        """Return the name of the first argument that another call has with another value; otherwise empty."""
        names = [*self.others, *(name for name in call.others if name not in self.others)]
        return next((name for name in names if not _is_equal(self.others.get(name), call.others.get(name))), "")


class CallRecorder:
    """The calls of the layers of a copy, which return the same hidden states in each run.

    Attributes:
        calls: Calls of the present run.
        hidden: Hidden states that each layer returns; None before the first call.
        count: Number of layers.
    """

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.hidden: Tensor | None = None
        self.count = 0

    def in_place_of(self, layers: nn.Module, values: int) -> nn.ModuleList:
        """Return an identity in place of each layer, which records its calls.

        Args:
            layers: List of the layers.
            values: Number of values that each layer returns.
        """
        own = [_RecordingLayer(each, values, number, self) for number, each in enumerate(layers.children())]
        self.count = len(own)
        return nn.ModuleList(own)

    def received(self, call: LayerCall) -> Tensor:
        """Record a call of a layer, and return the hidden states that go on to the next layer."""
        self.calls.append(call)
        # Values that no other code has, so that stages show where hidden states are used. They are the same for every
        # stage, so that masks and positions differ only if they depend on something else.
        if self.hidden is None:
            self.hidden = torch.rand(call.hidden.shape, generator=torch.Generator().manual_seed(0))
        return self.hidden

    def difference(self, whole: Sequence[LayerCall]) -> str:
        """Return the first difference of a stage's calls to those of the same layers in the full model, or nothing."""
        for call, of_whole in zip(self.calls, whole, strict=True):
            if argument := of_whole.difference(call):
                return f"layer {call.number} receives another {argument!r}"
        return ""


def kinds_of_stages(count: int) -> Iterator[tuple[str, range]]:
    """Yield the kinds of stages that a model of so many layers has, each with its longest run of layers."""
    runs = {"first": range(count - 1), "middle": range(1, count - 1), "last": range(1, count)}
    yield from ((name, run) for name, run in runs.items() if run)


class _OtherValue:
    """A value that a layer returns in addition to hidden states."""


class _RecordingLayer(Absent):
    """Identity that records its arguments.

    Args:
        layer: The layer in whose place it is.
        values: Number of values that the layer returns.
        number: Position of the layer.
        seen: Recorder of the calls.
    """

    def __init__(self, layer: nn.Module, values: int, number: int, seen: CallRecorder) -> None:
        super().__init__(layer, values)
        self._number, self._seen = number, seen

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Record the arguments, and return the recorder's hidden states."""
        hidden, *others = args or (keywords.pop("hidden_states"),)
        named = {**{f"argument {position}": each for position, each in enumerate(others, 1)}, **keywords}
        return self.returned(self._seen.received(LayerCall(self._number, hidden, named)), _OtherValue())


def line_of(error: Exception, model: nn.Module) -> str:
    """Return the file and line of a model's own code that raised an error, or else of the code that it calls."""
    files = {getattr(sys.modules.get(type(module).__module__), "__file__", None) for module in model.modules()}
    # The code of torch and of decorators is below, and says less about the model.
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
    own = [each for each in frames if each.filename in files and "/torch/" not in each.filename]
    at = [*frames, *own][-1]
    return f"{Path(at.filename).name}:{at.lineno}"


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two nested arguments are equal; objects such as caches by their type."""
    first, second = tree_leaves(one), tree_leaves(other)
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
                return False
        elif type(a) is not type(b) or (isinstance(a, str | int | float) and a != b):
            return False
    return True


def _around(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules with parameters that do not contain the layers, with their names."""
    path, parent = "", model
    for part in layers.split("."):
        for name, child in children_of(parent).items():
            if name != part and child is not None and next(child.parameters(), None) is not None:
                yield f"{path}{name}", child
        path, parent = f"{path}{part}.", parent.get_submodule(part)


def small_copy(model: nn.Module, layers: str, instead: nn.ModuleList) -> nn.Module:
    """Return a copy on the CPU, in fp32 and without hooks, whose large parameters take no memory.

    Args:
        model: The model.
        layers: Name of its list of layers.
        instead: Modules in place of the layers.
    """
    generator = torch.Generator().manual_seed(1)
    replaced: dict[nn.Module | nn.Parameter, Any] = {model.get_submodule(layers): instead}

    def values(parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in replaced:
            one = torch.rand(parameter.shape[-1:], generator=generator)
            one = one if parameter.is_floating_point() else one.to(parameter.dtype)
            replaced[parameter] = nn.Parameter(one.expand(parameter.shape), requires_grad=False)
        found: nn.Parameter = replaced[parameter]
        return found

    def buffer(x: Tensor) -> Tensor:
        dtype = torch.float32 if x.is_floating_point() else x.dtype
        return torch.ones(x.shape, dtype=dtype) if x.is_meta else x.detach().to("cpu", dtype)

    def copied(module: nn.Module) -> nn.Module:
        if module not in replaced:
            replaced[module] = made = shallow(module)
            forward_hooks_of(made).clear()
            forward_pre_hooks_of(made).clear()
            for table, copy_of in ((parameters_of, values), (buffers_of, buffer), (children_of, copied)):
                own = table(made)
                own.update([(name, copy_of(each)) for name, each in own.items() if each is not None])
        found: nn.Module = replaced[module]
        return found

    return copied(model).eval()
