"""The precisions there are, and what a device needs for each."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Formats in which a precision stores and multiplies numbers.

    Args:
        weights: dtype that the module's parameters get. None leaves them as they are.
        autocast: dtype in which torch.autocast multiplies. None: autocast is off.
        masters: Whether the optimizer gets fp32 copies of the parameters.
        scaled: Whether the loss is scaled by default, because small gradients would become 0.
        rounded: Whether new parameters are rounded stochastically, since they have no masters.
        tf32: Whether fp32 matmuls use TF32.
        float8: Whether linear layers multiply float8 numbers.
    """

    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None
    masters: bool = False
    scaled: bool = False
    rounded: bool = False
    tf32: bool = False
    float8: bool = False


PRECISIONS = {
    "fp32": Precision(),
    "tf32": Precision(tf32=True),
    "bf16": Precision(weights=torch.bfloat16, masters=True),
    "bf16-amp": Precision(autocast=torch.bfloat16),
    "fp16-amp": Precision(autocast=torch.float16, scaled=True),
    "fp16": Precision(weights=torch.float16, masters=True, scaled=True),
    "bf16-sr": Precision(weights=torch.bfloat16, rounded=True),
    "fp8": Precision(weights=torch.bfloat16, masters=True, float8=True),
}


def precision_of(name: str) -> Precision:
    """Return the precision of a name that `mixed` accepts.

    Raises:
        ValueError: There is no precision of that name.
    """
    if name not in PRECISIONS:
        raise ValueError(f"precision is {name!r}; it can be {', '.join(map(repr, PRECISIONS))}")
    return PRECISIONS[name]


def check_device(name: str, device: torch.device) -> None:
    """Raise an error unless a device supports a precision. `mixed` calls this for each parameter's device.

    Args:
        name: Name of the precision.
        device: Device of the module.

    Raises:
        RuntimeError: The device does not support the precision; the message names the missing units and a fix.
    """
    nvidia = device.type == "cuda" and torch.version.hip is None
    capability = torch.cuda.get_device_capability(device) if nvidia else (0, 0)
    kind = "an AMD GPU" if device.type == "cuda" and not nvidia else device.type
    problem = lack(name, kind, capability)
    if problem is not None:
        raise RuntimeError(problem)


def lack(name: str, device: str, capability: tuple[int, int]) -> str | None:
    """Return the error message for a device that does not support a precision; None if it does.

    Args:
        name: Name of the precision.
        device: Type of the device, such as "cuda".
        capability: Compute capability of an NVIDIA GPU; (0, 0) for anything else.
    """
    version = ".".join(map(str, capability))
    here = f"this GPU has compute capability {version}" if device == "cuda" else f"the module is on {device!r}"
    if name == "tf32" and capability < (8, 0):
        return (
            f"'tf32' needs the TF32 units of an NVIDIA GPU of compute capability 8.0 or above, and {here}; use 'fp32'"
        )
    if name == "fp8" and (device not in ("cuda", "cpu") or (device == "cuda" and capability < (8, 9))):
        return (
            f"'fp8' needs the float8 units of an NVIDIA GPU of compute capability 8.9 or above, and {here}; use 'bf16'"
        )
    if name.startswith("bf16") and device == "cuda" and capability < (8, 0):
        return (
            f"{name!r} needs bfloat16 units, compute capability 8.0 or above, and {here}; "
            f"use {'fp16-amp' if name.endswith('amp') else 'fp16'!r}"
        )
    return None
