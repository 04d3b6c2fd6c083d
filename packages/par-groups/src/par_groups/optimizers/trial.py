"""Trial of an optimizer: it checks the user's declaration and finds the state that the class keeps.

An optimizer may treat each element separately in a few steps, and not later. A trial therefore proves nothing: the
table in `classes`, or the user, specifies how a class works, and a trial can only contradict. An optimizer of the same
class and settings steps the same numbers several times, in float64:

- As they are: one optimizer has three tensors, the largest of 8,192 elements. The other runs compare with this one.
- Each alone: three optimizers have one of the tensors each. If numbers differ, the optimizer reads all tensors.
- Others louder: all gradients but the first tensor's are a thousand times larger. If the first tensor differs, the
  optimizer reads all tensors.
- As one: one optimizer has one flat tensor of all elements. If numbers differ, the optimizer reads full tensors.
- Half louder: gradients are a thousand times larger in the second half of each tensor. If the first half differs, the
  optimizer reads full tensors.

The learning rate of a warm-up moves almost nothing, so a second round uses a learning rate of 0.1. Gradients point in
nearly one direction, so that methods which estimate their step size begin to move.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .classes import UpdateScope
from .clone import clone_of

_STEPS = 3
_TRIAL_STEPS = 6
# The first tensor has more than 4,096 elements, from which on 8-bit optimizers keep their state in blocks.
_SHAPES = ((64, 128), (4, 6), (3, 5))

Tensors = Sequence[torch.Tensor]


def is_per_element(name: str, value: object, shape: torch.Size) -> bool:
    """Return whether an entry of an optimizer's state has one number per element of a parameter.

    Args:
        name: Name of the entry.
        value: Its value.
        shape: Shape of the parameter.
    """
    return name != "step" and isinstance(value, torch.Tensor) and value.shape == shape


def find_scope_violation(optimizer: Optimizer, group: Mapping[str, Any], scope: UpdateScope) -> str | None:
    """Return in words how an optimizer's update depends on more than `scope`; None if a trial finds nothing.

    The trial steps copies of the optimizer on small tensors. It can find a violation, but cannot prove a scope.

    Args:
        optimizer: Optimizer whose class is tried; it is not changed.
        group: Param group whose settings are tried.
        scope: `UpdateScope.ELEMENT` or `UpdateScope.TENSOR`.

    Raises:
        Exception: A step of the trial raises an error.
    """
    rates: list[float | None] = [None]
    if isinstance(group.get("lr"), int | float | torch.Tensor):
        rates.append(0.1)
    with _apart():
        for rate in rates:
            found = _violation(_Trial(optimizer, group, rate), scope)
            if found:
                return found
    return None


@contextmanager
def _apart() -> Iterator[None]:
    """Run a trial on the CPU, whatever the default device is, without a change of the user's random numbers."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        yield


def draws_numbers(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a step draws from torch's generator, so that ranks that repeat the step would differ.

    Args:
        optimizer: The optimizer whose class is tried; it is not touched.
        group: The param group whose settings are tried.

    Raises:
        Exception: A step of the trial raises an error.
    """
    with _apart():
        before = torch.get_rng_state()
        _Trial(optimizer, group, None).run(lambda tensors: [tensors], seeds=False)
        return not torch.equal(before, torch.get_rng_state())


def _violation(trial: "_Trial", scope: UpdateScope) -> str | None:
    """Return in words how an update depends on more than `scope`; None if the trial finds nothing."""
    as_they_are, clones = trial.run(lambda tensors: [tensors])
    each_alone, _ = trial.run(lambda tensors: [[tensor] for tensor in tensors])
    louder, _ = trial.run(lambda tensors: [tensors], louder=lambda number, _: number > 0)
    first = as_they_are[0].numel()
    if trial.differs(as_they_are, each_alone) or trial.differs(as_they_are, louder, first):
        return "it updates a tensor by what is in other tensors"
    if scope is not UpdateScope.ELEMENT:
        return None
    flat, _ = trial.run(lambda tensors: [[torch.cat([tensor.flatten() for tensor in tensors])]])
    if trial.differs(as_they_are, flat):
        return "it updates a flat tensor otherwise than a tensor of another shape"
    half, _ = trial.run(lambda tensors: [tensors], louder=lambda _, place: place >= 0.5)
    if trial.differs(as_they_are, half, first // 2):
        return "it updates an element by what else is in its tensor"
    return _odd_state(clones[0])


def _odd_state(clone: Optimizer) -> str | None:
    """Find state that a slice of a tensor cannot keep: it is neither per element nor one number. Return it in words."""
    for parameter, state in clone.state.items():
        for name, value in state.items() if isinstance(state, Mapping) else ():
            is_number = isinstance(value, torch.Tensor) and value.numel() <= 1
            if is_number or isinstance(value, int | float | complex | str | None):
                continue
            is_per_parameter = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_per_parameter and (value.is_floating_point() or value.dtype == torch.bool):
                continue
            kind = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
            return f"its state {name!r} of a tensor of shape {tuple(parameter.shape)} is {kind}"
    return None


class _Trial:
    """Steps of an optimizer with the tensors of the trial.

    Args:
        optimizer: Optimizer whose class is tried.
        group: Param group whose settings are tried.
        rate: Learning rate of the trial; None: the group's.
    """

    def __init__(self, optimizer: Optimizer, group: Mapping[str, Any], rate: float | None) -> None:
        self._optimizer, self._group, self._rate = optimizer, group, rate
        generator = torch.Generator().manual_seed(0)
        self._start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
        self._direction = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]

    def run(
        self,
        arrange: Callable[[Tensors], Sequence[Tensors]],
        louder: Callable[[int, torch.Tensor], Any] | None = None,
        *,
        seeds: bool = True,
    ) -> tuple[list[torch.Tensor], list[Optimizer]]:
        """Return the numbers after a few steps, and the optimizers.

        Args:
            arrange: Function that returns the tensors of each optimizer.
            louder: Function of a tensor's number and of the relative positions of its elements, from 0 to 1, that
                returns whether each gradient is a thousand times larger.
            seeds: Whether torch's generator starts at the same state each time.
        """
        if seeds:
            # An optimizer may draw random numbers. With one seed, only its scope can change the result.
            torch.default_generator.manual_seed(0)
        parameters = [[nn.Parameter(tensor.clone()) for tensor in own] for own in arrange(self._start)]
        clones = [_cpu_clone(self._optimizer, self._group, own, self._rate) for own in parameters]
        noise = torch.Generator().manual_seed(1)
        for _ in range(_TRIAL_STEPS):
            gradients = []
            for number, direction in enumerate(self._direction):
                drawn = torch.randn(direction.shape, generator=noise, dtype=torch.float64)
                gradient = direction + 0.3 * drawn
                if louder is not None:
                    places = torch.linspace(0, 1, gradient.numel()).view(gradient.shape)
                    gradient = torch.where(torch.as_tensor(louder(number, places)), 1000 * gradient, gradient)
                gradients.append(gradient)
            for own, given in zip(parameters, arrange(gradients), strict=True):
                for parameter, gradient in zip(own, given, strict=True):
                    parameter.grad = gradient.clone()
            for clone in clones:
                clone.step()
        return [parameter.detach() for own in parameters for parameter in own], clones

    def differs(self, one: Tensors, other: Tensors, count: int | None = None) -> bool:
        """Return whether the first `count` numbers differ by more than a thousandth of the largest move."""
        a, b, start = (torch.cat([tensor.flatten() for tensor in each])[:count] for each in (one, other, self._start))
        move = (a - start).nan_to_num().abs().max().item()
        # Kernels round differently for other shapes, so only differences far above rounding count.
        return not torch.allclose(a, b, rtol=0, atol=1e-3 * move + 1e-12, equal_nan=True)


def state_slots(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes, by name, of the state that an optimizer keeps for each element of a tensor.

    Args:
        optimizer: Optimizer whose class is tried; it is not changed.
        group: Param group whose settings are tried.
        dtype: Dtype of the tensor.
    """
    parameter, state = _state_of_steps(optimizer, group, dtype)
    return {name: value.dtype for name, value in state.items() if is_per_element(name, value, parameter.shape)}


def state_counter_bytes(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Return the bytes of state that an optimizer keeps per tensor instead of per element, such as Adam's step count.

    Args:
        optimizer: Optimizer whose class is tried; it is not changed.
        group: Param group whose settings are tried.
        dtype: Dtype of the tensor.
    """
    parameter, state = _state_of_steps(optimizer, group, dtype)
    return sum(
        value.nbytes
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not is_per_element(name, value, parameter.shape)
    )


def _state_of_steps(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> tuple[nn.Parameter, Mapping[str, Any]]:
    """Return a tensor after a few steps, and the state that the optimizer keeps for it."""
    with _apart():
        parameter = nn.Parameter(torch.ones(3, 5, dtype=dtype))
        clone = _cpu_clone(optimizer, group, [parameter])
        for _ in range(_STEPS):
            parameter.grad = torch.randn(3, 5, dtype=dtype)
            clone.step()
    return parameter, clone.state.get(parameter, {})


def _cpu_clone(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter], rate: float | None = None
) -> Optimizer:
    """Make an optimizer of the same class and settings, for other parameters and on the CPU."""
    settings = {name: _on_cpu(value) for name, value in group.items() if name not in ("params", "param_names")}
    lr = settings.get("lr")
    if isinstance(lr, int | float | torch.Tensor) and (rate is not None or float(lr) == 0):
        # A rate of 0, as before a warm-up, would move nothing, and a trial without moves finds nothing.
        rate = 1e-2 if rate is None else rate
        settings["lr"] = torch.full_like(lr, rate) if isinstance(lr, torch.Tensor) else rate
    if settings.get("train_mode") is False:  # schedule-free optimizers step in this mode only
        settings["train_mode"] = True
    # Capturable steps run only on GPUs, and compute the same numbers.
    if settings.get("capturable"):
        settings |= {"capturable": False, "foreach": False}
    clone = clone_of(optimizer, {**settings, "params": parameters})
    # A step may change these attributes in place, and the user's optimizer must not change.
    for name, value in optimizer.__dict__.items():
        if name in clone.__dict__ and name not in ("param_groups", "state") and isinstance(value, dict | list | set):
            clone.__dict__[name] = copy.copy(clone.__dict__[name])
        if name in clone.__dict__ and isinstance(value, torch.Tensor):
            clone.__dict__[name] = _on_cpu(value)
        # A generator of the optimizer's own must not advance in a trial.
        if isinstance(value, torch.Generator) and value.device.type == "cpu":
            clone.__dict__[name] = torch.Generator().set_state(value.get_state())
    for original in [parameter for parameter in group["params"] if parameter.numel()][:1]:
        for name, value in optimizer.state.get(original, {}).items():  # made by the constructor, as Adagrad's is
            for parameter in parameters:
                clone.state[parameter][name] = (
                    torch.full_like(parameter, value.flatten()[0].real.item())
                    if is_per_element(name, value, original.shape)
                    else _on_cpu(value)
                )
    return clone


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return copy.deepcopy(value) if isinstance(value, dict | list | set) else value
