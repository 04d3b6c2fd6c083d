"""Samples in an order that does not depend on the number of ranks: loaders, packing, mixtures, resume.

Modules that need torch are imported on first use, so that a command line can check its paths without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .loading.comparison import BatchComparison, read_once
    from .loading.device import move_to_device
    from .loading.loader import ShardedDataLoader, check_last_batch
    from .loading.position import LoaderPosition
    from .loading.randomness import (
        RandomStream,
        derive_seed,
        gather_random_states,
        get_random_states,
        restore_random_states,
    )
    from .loading.samplers import check_order, hash_order
    from .loading.sources import split_evenly
    from .loading.steps import StepRandomness
    from .loading.synchronized import synchronize_draws
    from .loading.workers import WorkerSignals
    from .text.corpus import Corpus, open_corpus, read_corpus
    from .text.folder import FolderText, read_folder_text
    from .text.mixture import MixtureDataset
    from .text.packed import PackedDataset
    from .text.packing import IGNORE_INDEX, PackedLayout, Packing, pack
    from .text.records import find_corpus_files, is_corpus
    from .text.tokenize import find_tokenizer_files, load_tokenizer

__version__ = "0.1.0"

__all__ = [
    "IGNORE_INDEX",
    "BatchComparison",
    "Corpus",
    "FolderText",
    "LoaderPosition",
    "MixtureDataset",
    "PackedDataset",
    "PackedLayout",
    "Packing",
    "RandomStream",
    "ShardedDataLoader",
    "StepRandomness",
    "WorkerSignals",
    "check_last_batch",
    "check_order",
    "derive_seed",
    "find_corpus_files",
    "find_tokenizer_files",
    "gather_random_states",
    "get_random_states",
    "hash_order",
    "is_corpus",
    "load_tokenizer",
    "move_to_device",
    "open_corpus",
    "pack",
    "read_corpus",
    "read_folder_text",
    "read_once",
    "restore_random_states",
    "split_evenly",
    "synchronize_draws",
]

_LATE = {
    "loading.comparison": ("BatchComparison", "read_once"),
    "loading.device": ("move_to_device",),
    "loading.loader": ("ShardedDataLoader", "check_last_batch"),
    "loading.position": ("LoaderPosition",),
    "loading.randomness": (
        "RandomStream",
        "derive_seed",
        "gather_random_states",
        "get_random_states",
        "restore_random_states",
    ),
    "loading.samplers": ("check_order", "hash_order"),
    "loading.sources": ("split_evenly",),
    "loading.steps": ("StepRandomness",),
    "loading.synchronized": ("synchronize_draws",),
    "loading.workers": ("WorkerSignals",),
    "text.corpus": ("Corpus", "open_corpus", "read_corpus"),
    "text.folder": ("FolderText", "read_folder_text"),
    "text.mixture": ("MixtureDataset",),
    "text.packed": ("PackedDataset",),
    "text.packing": ("IGNORE_INDEX", "PackedLayout", "Packing", "pack"),
    "text.records": ("find_corpus_files", "is_corpus"),
    "text.tokenize": ("find_tokenizer_files", "load_tokenizer"),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
