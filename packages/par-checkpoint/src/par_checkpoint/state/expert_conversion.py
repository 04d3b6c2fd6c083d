"""Experts: in memory the weights of all of a layer in one tensor, in the files one tensor an expert and projection."""

import re
from collections.abc import Sequence

from .conversion import Conversion, Shape, TensorSlice

_EXPERT = "{expert}"


def expert_conversion(
    pattern: str, gate: str | None, up: str, down: str, *, interleaved: bool = False, transposed: bool = False
) -> Conversion:
    """Return the `convert` function of a mixture of experts that is not a Transformers model.

    In memory a module of experts has packed parameters: `gate_up_proj` [experts, 2 f, h] and `down_proj`
    [experts, h, f], and perhaps `gate_up_proj_bias` and `down_proj_bias`. In the files every expert has weights
    [f, h], [f, h] and [h, f] of its own, as most families of checkpoints do. A rank that holds some experts, or some
    features of every expert, reads and writes those alone. All other tensors stay as they are.

    Args:
        pattern: Name of the modules of experts in memory, in which `*` stands for one number between dots.
        gate: Name in the files of the weight of an expert's gate: `{expert}` stands for the expert's number, and the
            numbers of `pattern` take the places of each `*`. None for experts without a gate, whose packed parameter is
            `up_proj`. The name of a bias ends in "bias" where that of the weight ends in "weight".
        up: Name in the files of the weight that is multiplied with the gate.
        down: Name in the files of the weight that leads back to the hidden size.
        interleaved: Whether memory has gate 0, up 0, gate 1, up 1 and so on, and not all gates before all ups.
        transposed: Whether memory has [experts, h, 2 f] and [experts, f, h].

    Returns:
        A function from a name and its global shape to slices in the files, or to None if it is no tensor of experts.

    Raises:
        ValueError: Names that do not fit the pattern, or that are equal.

    Example:
        mixtral = "model.layers.*.block_sparse_moe.experts.{expert}"
        layout = expert_conversion(
            "model.layers.*.mlp.experts", f"{mixtral}.w1.weight", f"{mixtral}.w3.weight", f"{mixtral}.w2.weight"
        )
        par_checkpoint.save(path, model=model, format=Format(convert=layout))
    """
    names = [name for name in (gate, up, down) if name is not None]
    for name in names:
        if name.count(_EXPERT) != 1 or name.count("*") != pattern.count("*"):
            raise ValueError(f"{name!r} must have {_EXPERT!r} once, and '*' as often as the pattern {pattern!r} has it")
    if len(set(names)) < len(names):
        raise ValueError(f"gate {gate!r}, up {up!r} and down {down!r} must be different names")
    first = "up_proj" if gate is None else "gate_up_proj"
    own = {first: tuple(names[:-1]), "down_proj": (down,)}
    module = re.escape(pattern).replace(r"\*", r"(\d+)")
    matches = re.compile(rf"{module}\.({'|'.join(own)})(_bias)?").fullmatch

    def convert(name: str, shape: Shape) -> Sequence[TensorSlice] | None:
        found = matches(name)
        if found is None:
            return None
        *numbers, projection, bias = found.groups()
        files = [_numbered(file, numbers, is_bias=bias is not None) for file in own[projection]]
        dim = len(shape) - 1 if bias or transposed else 1  # of the features that the files of an expert share
        if len(shape) != (2 if bias else 3) or shape[dim] % len(files):
            raise ValueError(
                f"{name!r} has shape {shape}; experts' weights have three dims and their biases two, and gate and up "
                "are as wide as each other"
            )
        width = shape[dim] // len(files)
        dims = (1,) if bias else (2, 1) if transposed else (1, 2)
        in_files = tuple(width if d == dim else shape[d] for d in dims)
        step = (len(files) if interleaved else 1, *(1 for _ in dims[1:]))
        parts = []
        for expert in range(shape[0]):
            for place, file in enumerate(files):
                # Interleaved, the features of the files alternate in memory; else they follow each other.
                at = place if interleaved else place * width
                start = (expert, *(at if d == dim else 0 for d in range(1, len(shape))))
                parts.append(
                    TensorSlice(
                        name=file.replace(_EXPERT, str(expert)), shape=in_files, start=start, dims=dims, step=step
                    )
                )
        return parts

    return convert


def _numbered(file: str, numbers: Sequence[str], *, is_bias: bool) -> str:
    """Return a name in the files with the numbers of the module in memory; the bias's name if `is_bias`."""
    if is_bias:
        stem, _, end = file.rpartition("weight")
        if end or not stem:
            raise ValueError(
                f"the bias beside {file!r} has no name in the files: the weight's does not end in 'weight'"
            )
        file = f"{stem}bias"
    for number in numbers:
        file = file.replace("*", number, 1)
    return file
