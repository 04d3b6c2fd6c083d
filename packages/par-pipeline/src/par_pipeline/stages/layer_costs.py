"""Cost of each layer: its parameters, or its time."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

RUNS = 3


def count_parameters(layers: Sequence[Any]) -> list[int]:
    """Return the number of elements of each layer's parameters.

    Raises:
        TypeError: A layer has no `parameters()`.
    """
    for position, layer in enumerate(layers):
        if not callable(getattr(layer, "parameters", None)):
            raise TypeError(f"layer {position} is a {type(layer).__name__}, which has no parameters() to count")
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]


def measure_seconds(layers: Sequence[Any], sample: Any) -> list[float]:
    """Measure the seconds of each layer's forward and backward: the median of a few runs after a warm-up run.

    Each layer gets the output of the one before it. Gradients, buffers and random numbers stay as they are.

    Args:
        layers: Modules, in the order in which they are called.
        sample: An input of the first layer.

    Raises:
        TypeError: A layer is no module, or there is no sample.
    """
    if sample is None:
        raise TypeError("the method 'time' runs the layers; give sample=, an input of the first one")
    seconds = []
    for position, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {position} is a {type(layer).__name__}, not a module, so that it cannot be timed")
        devices = {parameter.device for parameter in layer.parameters() if parameter.device.type != "cpu"}
        with torch.random.fork_rng(devices=list(devices)):
            times = []
            for _ in range(RUNS + 1):
                begin = _now()
                output = _forward_backward(layer, sample)
                times.append(_now() - begin)
        seconds.append(median(times[1:]))
        sample = output
    return seconds


def _forward_backward(layer: nn.Module, sample: Any) -> Any:
    """Return the layer's output, detached, after a backward whose gradients are dropped."""
    differentiable = isinstance(sample, torch.Tensor) and sample.is_floating_point()
    entry = sample.detach().requires_grad_() if differentiable else sample
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with torch.enable_grad():
        output = torch.func.functional_call(layer, buffers, (entry.clone() if differentiable else entry,))
    if not isinstance(output, torch.Tensor):
        return output
    if output.requires_grad:
        inputs = [parameter for parameter in layer.parameters() if parameter.requires_grad] + [entry] * differentiable
        torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)
    return output.detach()


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
