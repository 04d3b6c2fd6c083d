"""Activations that autograd saves of an encoder of images, traced on the meta device.

The model's own `get_image_features` runs once, on the images of two rows. Every rank with the encoder has it in full,
so a tensor group does not split what it saves.
"""

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from par_pipeline import image_inputs

from ..._torch_private import storage_key, tree_leaves, tree_map
from ...inputs import NumberWidths
from .kept import ATTENTION, ROWS, HeldTensor, MatmulMode, attention_of


@dataclass(frozen=True)
class TowerActivations:
    """Bytes that autograd saves of the images of one row.

    Args:
        saved: All saved tensors.
        checkpointed: Saved tensors if blocks save only their inputs.
        block: Saved tensors of the largest block, besides its input.
        fixed: Tensors that are independent of the images, such as numbers of positions.
        casts: Number of elements in the weights that autocast copies and autograd saves.
        flops: Floating-point operations of a forward for the images of one row.
        is_trained: Whether a block of the encoder has a backward.
    """

    saved: float = 0.0
    checkpointed: float = 0.0
    block: float = 0.0
    fixed: float = 0.0
    casts: int = 0
    flops: float = 0.0
    is_trained: bool = False


def trace_tower(
    model: Any, images: int, size: tuple[int, int] | None, context: int, numbers: NumberWidths
) -> TowerActivations:
    """Return the saved activations of a model's encoder of images, and of what merges its features with the text.

    Args:
        model: Hugging Face Transformers model on the meta device; it is not changed.
        images: Number of images in a row.
        size: Height and width of an image in pixels; None means the size in the configuration.
        context: Number of tokens in a row.
        numbers: Widths of numbers.

    Raises:
        ValueError: The encoder takes no such images, its forward cannot be followed without memory, or a row has fewer
            tokens than the images.
    """
    if not hasattr(model, "get_image_features"):
        raise ValueError(
            f"images={images}: {type(model).__name__} has no get_image_features, so it reads no images; leave images "
            "out"
        )
    traced = copy.deepcopy(model).to(torch.float32 if numbers.weight == 4 else torch.bfloat16).train()
    trace = _TowerTrace(traced, numbers)
    try:
        given = image_inputs(traced, ROWS * images, size, "meta")
        given["pixel_values"] = given["pixel_values"].to(traced.dtype)
        with attention_of(trace.attend), trace.watching(), FlopCounterMode(display=False) as counted:
            traced.set_attn_implementation(ATTENTION)
            found = traced.get_image_features(**given, return_dict=True)
    except ValueError:
        raise
    except Exception as error:  # it is the code of any family
        raise ValueError(
            f"images={images}: the encoder of images in {type(model).__name__} fails on the meta device "
            f"({type(error).__name__}: {error}), so its activations are unknown; leave images out to plan text"
        ) from error
    # Models read these two outputs. The graph of any other is gone when the layers run.
    features, between_layers = found.pooler_output, getattr(found, "deepstack_features", None)
    del found
    parts = [features] if isinstance(features, Tensor) else list(features)
    tokens = sum(each.numel() // each.shape[-1] for each in parts) // ROWS
    if tokens > context:
        raise ValueError(
            f"images={images}: {images} images need {tokens} tokens, and context={context}; pass fewer or smaller "
            "images, or a larger context"
        )
    result = trace.result(counted.get_total_flops() / ROWS, merged=context)
    del between_layers  # needed until here
    return result


class _TowerTrace:
    """Trace of an encoder and of the tensors that it saves.

    Args:
        model: Model, owned by this trace.
        numbers: Widths of numbers.
    """

    def __init__(self, model: nn.Module, numbers: NumberWidths) -> None:
        self._numbers = numbers
        self._block = -1  # number of the running block; -1 outside of blocks
        self._saved: list[tuple[int, weakref.ref[HeldTensor]]] = []
        self._inputs: list[tuple[int, Tensor]] = []
        self._flops = 0.0
        # Autograd also saves weights, which are counted as parameters, and tables of the model.
        self._parameters = {storage_key(each) for each in model.parameters()}
        self._buffers = {storage_key(each) for each in model.buffers()}
        kind: Any = import_module("transformers.modeling_layers").GradientCheckpointingLayer
        for number, block in enumerate(each for each in model.modules() if isinstance(each, kind)):
            block.gradient_checkpointing = False
            self._watch(number, block)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all tensors that autograd saves while a context lasts."""

        def keep(tensor: Tensor) -> HeldTensor:
            held = HeldTensor(tensor)
            self._saved.append((self._block, weakref.ref(held)))
            return held

        with (
            saved_tensors_hooks(keep, lambda saved: saved.tensor),
            torch.enable_grad(),
            MatmulMode(self._numbers),
            _MetaMode(),
        ):
            yield

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any
    ) -> tuple[Tensor, None]:
        """Return a fused attention's output [B, S, heads, features], from inputs [B, heads, S, features]."""
        del module, others, named
        rows, heads, time, width = query.shape
        dtype = torch.float32 if self._numbers.product == 4 else torch.bfloat16
        # Two products of all queries with all keys, which attend in both directions.
        self._flops += 4 * rows * heads * time * key.shape[2] * width / ROWS
        output: Tensor = _Attention.apply(query.to(dtype), key.to(dtype), value.to(dtype))  # type: ignore[no-untyped-call]
        return output.transpose(1, 2).contiguous(), None

    def result(self, flops: float, merged: int) -> TowerActivations:
        """Return the sums over what the graph of the features still saves. Unused outputs are gone with their graph.

        Args:
            flops: Operations of matmuls.
            merged: Tokens of a row, for which autograd saves whether a feature replaces them, one byte each.
        """
        saved, inputs = defaultdict[int, float](float), defaultdict[int, float](float)
        weights, tables, seen = list[Tensor](), list[Tensor](), set[int]()
        for block, found in self._saved:
            held = found()
            if held is None or (key := storage_key(held.tensor)) in seen:
                continue
            seen.add(key)
            if key in self._parameters:
                weights.append(held.tensor)
            elif key in self._buffers:
                tables.append(held.tensor)
            else:
                saved[block] += held.tensor.untyped_storage().nbytes() / ROWS
        held_inputs = set[int]()
        for block, tensor in self._inputs:
            # All blocks get the same rotary tables, so each storage counts once.
            if block in saved and (key := storage_key(tensor)) not in held_inputs:
                held_inputs.add(key)
                inputs[block] += tensor.untyped_storage().nbytes() / ROWS
        outside = saved.pop(-1, 0.0) + merged
        return TowerActivations(
            saved=outside + sum(saved.values()),
            checkpointed=outside + sum(inputs.values()),
            block=max((size - inputs[block] for block, size in saved.items()), default=0.0),
            fixed=float(sum(table.untyped_storage().nbytes() for table in tables)),
            casts=sum(weight.numel() for weight in weights if weight.dim() > 1),
            flops=flops + self._flops,
            is_trained=bool(saved),
        )

    def _watch(self, number: int, block: nn.Module) -> None:
        """Note the inputs of a block, and while it runs, its number."""

        def enter(_: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            self._block = number
            tensors = tree_leaves((args, dict(keywords)))
            self._inputs += [(number, x) for x in tensors if isinstance(x, Tensor) and x.is_meta]

        def leave(*_: Any) -> None:
            self._block = -1

        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)


class _Attention(torch.autograd.Function):
    """A fused attention on the meta device. It saves the tensors of a backward that never runs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # As in torch's, the output lies in memory as the queries do if it has their shape.
        shape = *query.shape[:-1], value.shape[-1]
        output = torch.empty_like(query) if shape == query.shape else query.new_empty(shape)
        ctx.save_for_backward(query, key, value, output, torch.empty(query.shape[:-1], device="meta"))
        return output


class _MetaMode(TorchFunctionMode):
    """Operations between a tensor with values, such as a grid, and one on the meta device give one on the latter."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, with all tensors on the meta device if one is there."""
        del types
        given = (args, dict(kwargs or {}))
        if len({x.device.type for x in tree_leaves(given) if isinstance(x, Tensor)}) > 1:
            given = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, given)
        return function(*given[0], **given[1])
