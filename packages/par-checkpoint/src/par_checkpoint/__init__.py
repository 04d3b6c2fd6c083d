"""Sharded Hugging Face checkpoints from any topology into any topology, every byte checked."""

from ._checkpoints import Checkpoints, latest
from ._errors import CheckpointError, CorruptError, ReplacedError, StoreError
from ._handle import Save
from ._load import Report, load
from ._options import LoadOptions, SaveOptions
from ._save import save
from .state.conversion import Convert, Part
from .state.expert_layout import expert_layout
from .storage.steps import prune
from .storage.verify import Faults
from .tiers.gathered import HostPart
from .tools.inspect import Contents, inspect
from .tools.read import read
from .tools.verify import verify
from .transfer.sessions import release

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Contents",
    "Convert",
    "CorruptError",
    "Faults",
    "HostPart",
    "LoadOptions",
    "Part",
    "ReplacedError",
    "Report",
    "Save",
    "SaveOptions",
    "StoreError",
    "expert_layout",
    "inspect",
    "latest",
    "load",
    "prune",
    "read",
    "release",
    "save",
    "verify",
]
