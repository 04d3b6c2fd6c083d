"""Sharded Hugging Face checkpoints from any topology into any topology, every byte checked."""

from ._checkpoints import Checkpoints
from ._convert import Convert, Part
from ._errors import CheckpointError, CorruptError, ReplacedError
from ._handle import Save
from ._inspect import Contents, inspect, read
from ._load import Report, load
from ._options import LoadOptions, SaveOptions
from ._save import save
from ._steps import latest, prune
from ._verify import verify

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Contents",
    "Convert",
    "CorruptError",
    "LoadOptions",
    "Part",
    "ReplacedError",
    "Report",
    "Save",
    "SaveOptions",
    "inspect",
    "latest",
    "load",
    "prune",
    "read",
    "save",
    "verify",
]
