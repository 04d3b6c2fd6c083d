"""The dtypes that safetensors files hold: their names there, and the order of their tensors."""

import torch

from .._errors import CheckpointError, CorruptError

# In the order in which safetensors writes them: wider before narrower, so that every tensor is aligned to its elements.
_ORDERED = (
    ("U64", torch.uint64),
    ("I64", torch.int64),
    ("F64", torch.float64),
    ("C64", torch.complex64),
    ("F32", torch.float32),
    ("U32", torch.uint32),
    ("I32", torch.int32),
    ("BF16", torch.bfloat16),
    ("F16", torch.float16),
    ("U16", torch.uint16),
    ("I16", torch.int16),
    ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
    ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
    ("F8_E8M0", torch.float8_e8m0fnu),
    ("F8_E4M3", torch.float8_e4m3fn),
    ("F8_E5M2", torch.float8_e5m2),
    ("I8", torch.int8),
    ("U8", torch.uint8),
    ("BOOL", torch.bool),
)
_DTYPES = dict(_ORDERED)
_NAMES = {dtype: name for name, dtype in _ORDERED}
_ORDER = {dtype: place for place, (_, dtype) in enumerate(_ORDERED)}
_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")


def safetensors_name(dtype: torch.dtype, of: str) -> str:
    """The name of a dtype in safetensors files.

    Args:
        dtype: A torch dtype.
        of: The name of the tensor that has it, for the message.

    Raises:
        ValueError: safetensors has no such dtype.
    """
    if dtype not in _NAMES:
        raise ValueError(f"{of!r} is {dtype}, which safetensors files cannot hold; cast it, or give its parts instead")
    return _NAMES[dtype]


def is_dtype(value: object) -> bool:
    """Whether a value is a dtype that safetensors files hold."""
    return isinstance(value, torch.dtype) and value in _NAMES


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name in safetensors files.

    Args:
        name: A name such as "BF16".

    Raises:
        CheckpointError: A dtype of fewer than 8 bits.
        CorruptError: A name that safetensors does not know.
    """
    if name in _SUB_BYTE:
        raise CheckpointError(f"dtype {name} has elements of less than a byte, which are not read; unpack them first")
    if name not in _DTYPES:
        raise CorruptError(f"dtype {name!r} is none of {', '.join(_DTYPES)}; write the file again with safetensors")
    return _DTYPES[name]


def order_of(dtype: torch.dtype) -> int:
    """The place of a dtype's tensors in a file: those with lower numbers come first."""
    return _ORDER[dtype]
