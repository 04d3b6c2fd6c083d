"""Sharded Hugging Face checkpoints from any topology into any topology, every byte checked."""

from ._checkpoints import Checkpoints, latest
from ._errors import CheckpointError, CorruptError, ReplacedError, StoreError
from ._handle import Save
from ._load import LoadReport, load
from ._policies import Format, Tiers, Transfer
from ._save import save
from ._torch_file import load_torch_file, save_torch_file
from .live.publisher import Publication, Publisher
from .live.receiver import Receiver, Staged
from .live.rendezvous import Rendezvous
from .live.reshard import Moved, reshard
from .live.shadow import HeldShard, Shadow
from .state.conversion import Conversion, TensorSlice
from .state.expert_conversion import expert_conversion
from .state.state import State
from .storage.steps import prune
from .storage.verify import VerifyReport
from .tiers.gathered import HostShard
from .tools.inspect import CheckpointInfo, inspect
from .tools.read import read_tensor
from .tools.verify import verify
from .transfer.sessions import release_memory

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "Checkpoints",
    "Conversion",
    "CorruptError",
    "Format",
    "HeldShard",
    "HostShard",
    "LoadReport",
    "Moved",
    "Publication",
    "Publisher",
    "Receiver",
    "Rendezvous",
    "ReplacedError",
    "Save",
    "Shadow",
    "Staged",
    "State",
    "StoreError",
    "TensorSlice",
    "Tiers",
    "Transfer",
    "VerifyReport",
    "expert_conversion",
    "inspect",
    "latest",
    "load",
    "load_torch_file",
    "prune",
    "read_tensor",
    "release_memory",
    "reshard",
    "save",
    "save_torch_file",
    "verify",
]
