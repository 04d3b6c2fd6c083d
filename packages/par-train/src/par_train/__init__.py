"""The pieces of par wired together.

What needs torch is imported when it is first used, so that the command line answers at once.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._checkpoint import load_model
    from ._gpt import GPT

__version__ = "0.1.0"

__all__ = ["GPT", "load_model"]


def __getattr__(name: str) -> object:
    if name == "GPT":
        from ._gpt import GPT  # noqa: PLC0415

        return GPT
    if name == "load_model":
        from ._checkpoint import load_model  # noqa: PLC0415

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
