"""Samples in an order that does not depend on the number of ranks: loaders, packing, mixtures, resume.

What needs torch is imported when it is first used, so that a command line can check its paths without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .alike import draw_alike, order_of
    from .corpus import Corpus, open_corpus, read_corpus
    from .loader import GlobalDataLoader, Position, check_last_batch
    from .mixture import MixedRows
    from .packing import IGNORED, Packing, pack
    from .place import placed
    from .randomness import Draws, random_states, seed_number
    from .records import files_of, is_corpus
    from .rows import PackedRows
    from .shares import share
    from .tokenize import load_tokenizer, tokenizer_files
    from .workers import WorkerSignals

__version__ = "0.1.0"

__all__ = [
    "IGNORED",
    "Corpus",
    "Draws",
    "GlobalDataLoader",
    "MixedRows",
    "PackedRows",
    "Packing",
    "Position",
    "WorkerSignals",
    "check_last_batch",
    "draw_alike",
    "files_of",
    "is_corpus",
    "load_tokenizer",
    "open_corpus",
    "order_of",
    "pack",
    "placed",
    "random_states",
    "read_corpus",
    "seed_number",
    "share",
    "tokenizer_files",
]

_LATE = {
    "alike": ("draw_alike", "order_of"),
    "corpus": ("Corpus", "open_corpus", "read_corpus"),
    "loader": ("GlobalDataLoader", "Position", "check_last_batch"),
    "mixture": ("MixedRows",),
    "packing": ("IGNORED", "Packing", "pack"),
    "place": ("placed",),
    "randomness": ("Draws", "random_states", "seed_number"),
    "records": ("files_of", "is_corpus"),
    "rows": ("PackedRows",),
    "shares": ("share",),
    "tokenize": ("load_tokenizer", "tokenizer_files"),
    "workers": ("WorkerSignals",),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
