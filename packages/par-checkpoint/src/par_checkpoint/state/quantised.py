"""Quantized float8 tensors: an element's value is the product of its code and a separate scale."""

from collections.abc import Iterable, Mapping, Sequence

import torch

_NO_SCALE_OF_CODES = ("logit_scale", "logits_scale")  # parameters of models such as CLIP


def is_float8(dtype: torch.dtype) -> bool:
    """Return whether a dtype is one of torch's 8-bit floating-point dtypes."""
    return dtype.is_floating_point and dtype.itemsize == 1


class Scales:
    """The scales among some tensors, by the tensors that they may belong to.

    Publishers name them in many ways: `weight_scale_inv`, `weight_scale`, `weight.scale`, `scale_weight`,
    `gate_up_proj_scale`, `input_scale`. So a scale is any tensor whose last name says so, and belongs to the tensor
    whose name it continues and to the tensors of its module.

    Args:
        names: The names of all tensors.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._by_owner: dict[str, list[str]] = {}
        for name in names:
            module, _, leaf = name.rpartition(".")
            if leaf == "_extra_state":  # Transformer Engine pickles the scales of a module there
                self._by_owner.setdefault(f"{module}.", []).append(name)
            if "scale" not in leaf or leaf in _NO_SCALE_OF_CODES:
                continue
            owner = name[: len(name) - len(leaf) + leaf.index("scale")].rstrip("._")
            for each in {f"{module}.", owner}:
                self._by_owner.setdefault(each, []).append(name)

    def of(self, name: str) -> list[str]:
        """Return the scales of a tensor; only scales with its own name if there are any."""
        own = self._by_owner.get(name, ())
        return [scale for scale in own or self._by_owner.get(f"{name.rpartition('.')[0]}.", ()) if scale != name]


def check_cast(dtypes: Mapping[str, torch.dtype], names: Sequence[str], dtype: torch.dtype) -> None:
    """Raise if a cast would change values that are quantised.

    Args:
        dtypes: dtype of each tensor that is cast, by name in the files.
        names: Names of all tensors in the files.
        dtype: Target dtype of the cast.

    Raises:
        ValueError: A float8 tensor that has a scale would be cast.
    """
    coded = [name for name, own in dtypes.items() if is_float8(own) and own != dtype]
    scales = Scales(names) if coded else None
    for name in coded:
        if scales is not None and (own_scales := scales.of(name)):
            raise ValueError(f"dtype={dtype}: {quantised(name, own_scales)}; or leave dtype, which keeps the codes")


def quantised(name: str, scales: Sequence[str]) -> str:
    """Return the error for a tensor with quantised values."""
    return (
        f"{name!r} is quantised in the files: its float8 values count only times {' and '.join(map(repr, scales))}; "
        "load the folder with transformers, with the config of its kind and dequantize=True, and use what "
        "save_pretrained writes"
    )
