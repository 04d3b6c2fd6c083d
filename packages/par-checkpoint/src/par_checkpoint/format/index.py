"""The index beside several files: which tensor is in which."""

import json
from collections.abc import Mapping

from .._errors import corrupt
from .strict_json import parse_object, text_map

STEMS = {"model": "model", "optimizer": "optimizer/optimizer"}
"""By section: how its files' names begin."""

INDEX = {"model": "model.safetensors.index.json", "optimizer": "optimizer/optimizer.safetensors.index.json"}
"""By section: the index of its files."""


def encode_index(weight_map: Mapping[str, str], total_size: int, total_parameters: int) -> bytes:
    """The index as transformers writes it.

    Args:
        weight_map: The file of each tensor.
        total_size: Bytes of all tensors.
        total_parameters: Elements of all tensors.
    """
    metadata = {"total_parameters": total_parameters, "total_size": total_size}
    index = {"metadata": metadata, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def decode_index(data: bytes, file: str) -> dict[str, str]:
    """The file of each tensor.

    Args:
        data: The index.
        file: Its name, for messages.

    Raises:
        CorruptError: No such map, or a file that is not beside the index.
    """
    index = parse_object(data, file)
    if "weight_map" not in index:
        raise corrupt(file, f"has no weight_map, only {sorted(index)!r:.80}")
    weight_map = text_map(index["weight_map"], f"{file}, weight_map")
    for name in dict.fromkeys(weight_map.values()):
        if not is_base_name(name):
            raise corrupt(file, f"names the file {name!r:.80}, but only plain names in the same folder are opened")
    return weight_map


def is_base_name(name: str) -> bool:
    """Whether a name can only mean a visible file of the folder itself."""
    return name.isprintable() and not name.startswith(".") and not set(name) & {"/", "\\"} and name != ""
