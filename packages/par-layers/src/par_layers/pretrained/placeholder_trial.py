"""Trial of a model's own comparison of images with their placeholders, without computing the images.

How many placeholders an image needs, each family computes anew: from patches, of which some are merged or left out, and
tokens that end a row. So a copy of the model on the meta device runs up to the comparison that its forward makes. Token
ids stay on the CPU, where they can be counted.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_COMPARISON = "get_placeholder_mask"
"""Method of models of Hugging Face Transformers that compares the features of images with the placeholders."""


class PlaceholderTrial:
    """Whether the images of a batch fit the placeholders in its token ids, as the model compares them.

    Args:
        model: A model of Hugging Face Transformers, or this rank's part of one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copy: nn.Module | None = None
        self._is_possible = True
        self._seen: dict[tuple[Any, ...], str | None] = {}

    def problem(self, batch: Mapping[str, Tensor], found: int) -> str | None:
        """Return the error that the model's forward will raise; None if the images fit, or if it cannot be tried.

        Args:
            batch: Keywords of the model's forward.
            found: Number of placeholders in `input_ids`.
        """
        if not self._is_possible:
            return None
        shape = batch["input_ids"].shape
        images = {name: x for name, x in batch.items() if x.shape[:2] != shape}
        # Integers, such as the size of each image before it was scaled, count by their values.
        if not all(x.is_floating_point() for x in images.values()):
            return self._run(batch)
        key = (found, *((name, x.shape) for name, x in images.items()))
        if key not in self._seen:
            self._seen[key] = self._run(batch)
        return self._seen[key]

    def _run(self, batch: Mapping[str, Tensor]) -> str | None:
        # In fp32, as the copy: a forward may expect pixels in the dtype of its weights.
        inputs = {
            name: torch.empty(x.shape, device="meta", dtype=torch.float32) if x.is_floating_point() else x.cpu()
            for name, x in batch.items()
        }
        try:
            with torch.no_grad(), _IntegersOnHost():
                self._copy = self._copy or _copy_until_compared(self._model)
                self._copy(**inputs, use_cache=False)
        except _ComparedError:
            return None
        except ValueError as error:  # of the comparison, or of the tower, such as a size that it was not made for
            return str(error)
        except Exception:  # code of any family, which may read the numbers of pixels
            self._is_possible = False
        return None


class _ComparedError(Exception):
    """The model has found that images and placeholders fit; it ends the forward of the copy."""


class _IntegersOnHost(TorchFunctionMode):
    """Lets a model on the meta device compute counts of tokens from the sizes of images, on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.as_tensor and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            keywords.pop("device", None)
        return func(*args, **keywords)


def _copy_until_compared(model: Any) -> nn.Module:
    """Return a model of the same configuration on the meta device, whose forward ends after its comparison."""
    with torch.device("meta"):
        config = copy.deepcopy(model.config)
        copied = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    embedding = copied.get_input_embeddings()
    embedding.forward = lambda ids: torch.empty(
        *ids.shape, embedding.weight.shape[-1], device="meta", dtype=torch.float32
    )
    inner = next(each for each in copied.modules() if hasattr(each, _COMPARISON))
    compare = getattr(inner, _COMPARISON)

    def compare_only(*args: Any, **keywords: Any) -> None:
        compare(*args, **keywords)
        raise _ComparedError

    setattr(inner, _COMPARISON, compare_only)
    evaluated: nn.Module = copied.eval()
    return evaluated
