"""Several optimizers of one model as a single optimizer, for gradient norms, precision policies and checkpoints."""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from .optimizers import zero_grad_


class JointOptimizer(Optimizer):
    """Several optimizers of one model as a single optimizer, such as Muon for matrices and AdamW for the rest.

    The param groups are the same dicts as in the optimizers, concatenated; each optimizer keeps its own state. An lr
    scheduler, a gradient norm or a checkpoint of the joint optimizer therefore covers all of them.

    Args:
        *optimizers: Optimizers without common parameters.

    Attributes:
        optimizers: The optimizers as a tuple.

    Raises:
        TypeError: An argument is not an optimizer, or there is no argument.
        ValueError: Two optimizers have a parameter in common.

    Example:
        optimizer = JointOptimizer(Muon(matrices, lr=0.02), AdamW(others))
        loss.backward()
        optimizer.step()
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        for number, one in enumerate(optimizers):
            if not isinstance(one, Optimizer) or isinstance(one, JointOptimizer):
                raise TypeError(f"optimizer {number} is a {type(one).__name__}; give torch.optim.Optimizers")
        if not optimizers:
            raise TypeError("JointOptimizer() was given no optimizer; give those of the model's parameters")
        owners: dict[torch.Tensor, int] = {}
        for number, one in enumerate(optimizers):
            for tensor in (tensor for group in one.param_groups for tensor in group["params"]):
                if owners.setdefault(tensor, number) != number:
                    kinds = type(optimizers[owners[tensor]]).__name__, type(one).__name__
                    raise ValueError(
                        f"a parameter of shape {tuple(tensor.shape)} is in the {kinds[0]} and in the {kinds[1]}, which "
                        "would both step it; give each parameter to one optimizer"
                    )
        self.optimizers = optimizers
        self._state = _JointState(optimizers)
        # `Optimizer.__setstate__` reads the defaults.
        self.__dict__["defaults"] = {}
        self.__setstate__({})  # makes room for hooks; Optimizer's constructor would make param groups of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Param groups of all optimizers, in a new list."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of all optimizers; each entry is stored in its optimizer."""
        return self._state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the step of every optimizer, one after the other.

        Args:
            closure: Function that is called once before the steps; it may compute gradients.

        Returns:
            Return value of the closure.
        """
        loss = None
        # Each optimizer would call the closure again, so it is called here and not passed on.
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            one.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters.

        Args:
            set_to_none: Whether the gradients become None instead of zeros. Default: True.
        """
        for one in self.optimizers:
            zero_grad_(one, set_to_none)

    def __getattr__(self, name: str) -> Any:
        """Return `train` or `eval` over all schedule-free optimizers, if any optimizer has these modes."""
        switches = []
        # While an object is unpickled it has no `optimizers` yet, and a plain access would call this method again.
        if name in {"train", "eval"}:
            switches = [getattr(one, name) for one in self.__dict__.get("optimizers", ()) if hasattr(one, name)]
        if not switches:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        def switch() -> None:
            for each in switches:
                each()

        return switch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of optimizers of the same kinds and param groups, in the same order.

        Args:
            state_dict: Return value of `state_dict` of a joint optimizer.

        Raises:
            ValueError: The state has another number of param groups or of parameters.
        """
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(saved)} param groups, and here are {len(self.param_groups)}; give that of a joint "
                "optimizer of the same optimizers"
            )
        first = 0
        for one in self.optimizers:
            # A state dict numbers the parameters through all param groups, and each optimizer counts its own from 0.
            own, saved = saved[: len(one.param_groups)], saved[len(one.param_groups) :]
            count = sum(len(group["params"]) for group in own)
            state = {
                key - first if isinstance(key, int) else key: value
                for key, value in state_dict["state"].items()
                # An entry without a number belongs to no parameter; the first optimizer keeps it.
                if (key in range(first, first + count) if isinstance(key, int) else one is self.optimizers[0])
            }
            groups = [{**group, "params": [i - first for i in group["params"]]} for group in own]
            one.load_state_dict({"state": state, "param_groups": groups})
            first += count

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise an error, because the optimizer for the group is not specified.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"a param group with {sorted(param_group)} was added to {len(self.optimizers)} optimizers at once; add it "
            "to one of JointOptimizer.optimizers"
        )


class _JointState(MutableMapping[Any, Any]):
    """State of several optimizers by tensor; entries under other keys belong to the first optimizer.

    Args:
        optimizers: Optimizers.
    """

    def __init__(self, optimizers: tuple[Optimizer, ...]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, key: Any) -> Any:
        for one in self._optimizers:
            if key in one.state:
                return one.state[key]
        raise KeyError(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._owner(key).state[key] = value

    def __delitem__(self, key: Any) -> None:
        for one in self._optimizers:
            if key in one.state:
                del one.state[key]
                return
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        for one in self._optimizers:
            yield from one.state

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)

    def _owner(self, key: Any) -> Optimizer:
        """Return the optimizer that has a tensor."""
        if not isinstance(key, torch.Tensor):
            return self._optimizers[0]
        for one in self._optimizers:
            if any(tensor is key for group in one.param_groups for tensor in group["params"]):
                return one
        raise KeyError(f"a tensor of shape {tuple(key.shape)} is in no param group of these optimizers")
