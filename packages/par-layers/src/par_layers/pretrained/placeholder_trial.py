"""Trial of a model's own comparison of images with their placeholders, without computing the images.

Each family computes in its own way how many placeholders an image needs: it merges patches, leaves out a class token,
or ends each row with a token. So a copy of the model on the meta device runs up to the comparison in its forward. Token
ids stay on the CPU, where they can be counted.
"""

import copy
import inspect
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_COMPARISONS = ("get_placeholder_mask", "inputs_merger")
"""Methods of models of Hugging Face Transformers that compare the features of images with the placeholders."""

_KEPT = 256
"""Number of results that are kept; datasets with images of any size never repeat some of them."""


class PlaceholderTrial:
    """Whether the images of a batch fit the placeholders in its token ids, as the model compares them.

    Args:
        model: A model of Hugging Face Transformers, or this rank's part of one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copy: nn.Module | None = None
        self._is_possible = True
        self._reads_pixels = False
        self._has_compared = False
        self._seen: dict[tuple[Any, ...], tuple[str | None, int | None]] = {}

    def problem(self, batch: Mapping[str, Any], found: int) -> str | None:
        """Return the error that the model's forward will raise; None if the images fit, or if it cannot be tried.

        Args:
            batch: Keywords of the model's forward.
            found: Number of placeholders in `input_ids`.
        """
        return self._compared(batch, found)[0]

    def sizes(self, batch: Mapping[str, Any], of_images: Collection[str]) -> list[int] | None:
        """Return how many placeholders each image needs; None if it cannot be tried.

        Args:
            batch: Keywords of the model's forward, which `problem` accepts.
            of_images: Keys with an entry for each image, `pixel_values` among them.
        """
        sizes: list[int] = []
        for number, pixels in enumerate(batch["pixel_values"]):
            # Models that read pixels take zeros for padding, and need one image, which would be the padding here.
            if self._reads_pixels and not pixels.any():
                sizes.append(0)
                continue
            alone = {name: x[number : number + 1] if name in of_images else x for name, x in batch.items()}
            size = self._compared(alone, 0)[1]
            if size is None:
                return None
            sizes.append(size)
        return sizes

    def _compared(self, batch: Mapping[str, Any], found: int) -> tuple[str | None, int | None]:
        """Return the problem, if there is one, and the number of features that were compared, if it is known."""
        if not self._is_possible:
            return None, None
        shape = batch["input_ids"].shape
        images = {name: x for name, x in batch.items() if not isinstance(x, Tensor) or x.shape[:2] != shape}
        # Integers, such as the size of each image before it was scaled, count by their values.
        values = [x for x in images.values() if isinstance(x, Tensor) and not x.is_floating_point()]
        if self._reads_pixels or sum(x.numel() for x in values) > 1024:
            return self._run(batch)
        shapes = [(name, x.shape if isinstance(x, Tensor) else repr(x)) for name, x in images.items()]
        key = (found, *shapes, *(tuple(x.flatten().tolist()) for x in values))
        if key not in self._seen:
            if len(self._seen) >= _KEPT:
                self._seen.clear()
            self._seen[key] = self._run(batch)
        return self._seen[key]

    def _run(self, batch: Mapping[str, Any]) -> tuple[str | None, int | None]:
        def converted(x: Any) -> Any:
            if not isinstance(x, Tensor) or (self._reads_pixels and x.shape[:2] != batch["input_ids"].shape):
                return x
            # In fp32, as the copy: a forward may expect pixels in the dtype of its weights.
            return torch.empty(x.shape, device="meta", dtype=torch.float32) if x.is_floating_point() else x.cpu()

        inputs = {name: converted(x) for name, x in batch.items()}
        try:
            with torch.no_grad(), _IntegersOnHost():
                self._copy = self._copy or _copy_until_compared(self._model)
                self._copy(**inputs, use_cache=False)
        except _ComparedError as compared:
            self._has_compared = True
            return compared.problem, compared.features
        except ValueError as error:  # of the tower, such as a size that it was not made for
            return str(error), None
        except Exception as error:  # code of any family, which may read the numbers of pixels
            # A copy that has compared before fails because of the batch, unless it needs numbers that it lacks.
            if self._has_compared:
                is_of_batch = "meta" not in str(error) and not isinstance(error, NotImplementedError)
                return (f"{type(error).__name__}: {error}" if is_of_batch else None), None
            if self._copy is not None and not self._reads_pixels:
                self._reads_pixels = True
                return self._run(batch)
            self._is_possible = False
        return None, None


class _ComparedError(Exception):
    """The model has compared images and placeholders; it ends the forward of the copy."""

    def __init__(self, problem: str | None, features: int) -> None:
        super().__init__(problem)
        self.problem, self.features = problem, features


class _IntegersOnHost(TorchFunctionMode):
    """Lets a model on the meta device compute counts of tokens from the sizes of images, on the CPU.

    Pixels that a model reads stay on their device until they meet its weights.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.as_tensor and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            keywords.pop("device", None)
        # Integers stay on the host also if a model moves them to its features, and nothing can come back from "meta".
        if func is Tensor.to and (args[0].is_meta or not args[0].is_floating_point()):
            args = tuple(x for x in args if not isinstance(x, torch.device | str))
            keywords.pop("device", None)
            if len(args) == 1 and not keywords:
                return args[0]
        given = [x for x in (*args, *keywords.values()) if isinstance(x, Tensor)]
        if any(x.is_meta for x in given) and any(_is_pixels(x) for x in given):
            args = tuple(x.to("meta") if _is_pixels(x) else x for x in args)
            keywords = {name: x.to("meta") if _is_pixels(x) else x for name, x in keywords.items()}
        return func(*args, **keywords)


def _is_pixels(x: Any) -> bool:
    """Return whether a value is a tensor with numbers, not only on the host, which its device does not share."""
    return isinstance(x, Tensor) and not x.is_meta and (x.is_floating_point() or x.device.type != "cpu")


def _code_of_caller(module: nn.Module) -> str | None:
    """Return what a caller has put on a module that may change the number of its features; None without anything."""
    replaced = {"forward", "get_image_features", *_COMPARISONS} & vars(module).keys()
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    for code in (*(vars(module)[name] for name in replaced), *hooks):
        inner = getattr(code, "func", code)  # of a partial
        source = str(getattr(inner, "__module__", type(inner).__module__))
        # The code of these packages changes no shapes.
        if not source.startswith(("par_", "torch.", "transformers.", "peft.", "accelerate.")):
            return f"a hook or method of {source!r}"
    return None


def _copy_until_compared(model: Any) -> nn.Module:
    """Return a model of the same configuration on the meta device, whose forward ends after its comparison.

    Raises:
        TypeError: A model within the model, such as its tower, is not of the kind that the configuration names, or
            has code of the caller.
    """
    with torch.device("meta"):
        config = copy.deepcopy(model.config)
        copied = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    kinds = {name: type(each) for name, each in copied.named_modules()}
    of_text = {*model.get_decoder().modules()}
    for name, each in model.named_modules():
        kind = kinds.get(name.replace("._orig_mod", ""))
        is_whole = hasattr(each, "get_input_embeddings") and not hasattr(each, "_orig_mod")
        if is_whole and kind is not type(each):
            raise TypeError(f"{name!r} is a {type(each).__name__}, and the configuration names a {kind}")
        if each not in of_text and (code := _code_of_caller(each)):
            raise TypeError(f"{name!r} has {code}, which a copy of its configuration lacks")
    embedding = copied.get_input_embeddings()
    embedding.forward = lambda ids: torch.empty(
        *ids.shape, embedding.weight.shape[-1], device="meta", dtype=torch.float32
    )
    inner = next(each for each in copied.modules() if any(hasattr(each, name) for name in _COMPARISONS))
    method = next(name for name in _COMPARISONS if hasattr(inner, name))
    compare = getattr(inner, method)

    def compare_only(*args: Any, **keywords: Any) -> None:
        given = inspect.signature(compare).bind(*args, **keywords).arguments
        hidden = given.pop("inputs_embeds").shape[-1]
        features = [x for name, x in given.items() if name != "input_ids" and isinstance(x, Tensor)]
        problem = None
        try:
            compare(*args, **keywords)
        except ValueError as error:
            problem = str(error)
        raise _ComparedError(problem, sum(x.numel() for x in features) // hidden)

    setattr(inner, method, compare_only)
    _share_outputs_(copied)
    evaluated: nn.Module = copied.eval()
    return evaluated


def _share_outputs_(model: nn.Module) -> None:
    """Let blocks of one class, with parameters and inputs of the same shapes, return the output of the first, in place.

    A tower has dozens of such blocks, and an operation on the meta device takes as long as one on a small tensor.
    """
    outputs: dict[tuple[Any, ...], Any] = {}

    def shared(forward: Any, of_block: tuple[Any, ...], *args: Any, **keywords: Any) -> Any:
        key = (*of_block, _shapes(args), _shapes(list(keywords.items())))
        if key not in outputs:
            outputs[key] = forward(*args, **keywords)
        return outputs[key]

    model.register_forward_pre_hook(lambda *_: outputs.clear())
    for block in [block for each in model.modules() if isinstance(each, nn.ModuleList) for block in each]:
        of_block = (type(block), *(parameter.shape for parameter in block.parameters()))
        block.forward = partial(shared, block.forward, of_block)


def _shapes(value: Any) -> Any:
    """Return the shapes of the tensors in nested lists and tuples, and what else they hold as text."""
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shapes, value)) if isinstance(value, list | tuple) else repr(value)
