"""The index of a model in several files, which maps tensors to files."""

import json
from collections.abc import Mapping

from .._errors import corrupt
from .strict_json import parse_object, text_map

STEMS = {"model": "model", "optimizer": "optimizer/optimizer"}
"""By section: how its files' names begin, unless a save is given another stem for the model's."""


def index_of(stem: str) -> str:
    """The name of the index of files whose names begin with a stem."""
    return f"{stem}.safetensors.index.json"


def encode_index(weight_map: Mapping[str, str], total_size: int, total_parameters: int) -> bytes:
    """The bytes of an index as transformers writes it.

    Args:
        weight_map: By the name of each tensor, the name of its file.
        total_size: Bytes of all tensors together.
        total_parameters: Number of elements of all tensors together.
    """
    metadata = {"total_parameters": total_parameters, "total_size": total_size}
    index = {"metadata": metadata, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def decode_index(data: bytes, file: str) -> dict[str, str]:
    """Reads and checks an index.

    Args:
        data: Its bytes.
        file: Its name, for messages.

    Returns:
        By the name of each tensor, the name of its file, which is a plain name beside the index.

    Raises:
        CorruptError: It is no index, or it names a file elsewhere.
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
