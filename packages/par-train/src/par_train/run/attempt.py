"""How far a launch has come in its folder, noted in the lock file: for the launcher, and for ranks started again.

torch's launcher gives each launch an id, and keeps it when it starts the ranks again after a failure.
"""

import os

from .files import RunFiles
from .lock import read_note

BEGUN, SAVED = "begun", "saved"


def is_restarted() -> bool:
    """Whether torchrun has started this rank again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def note_of(state: str, launch: str | None = None) -> str:
    """The note that a launch has come to that state.

    Args:
        state: `BEGUN`, when the folder belongs to this launch, or `SAVED`, when its last checkpoint is written.
        launch: The launcher's id; default: the id of the launch that this rank belongs to.
    """
    return f"{state} by job {os.environ.get('TORCHELASTIC_RUN_ID', 'unknown') if launch is None else launch}"


def has_begun(files: RunFiles) -> bool:
    """Whether the folder belongs to this rank's launch, from an earlier start of its ranks."""
    return read_note(files) in (note_of(BEGUN), note_of(SAVED))


def has_saved(files: RunFiles, launch: str) -> bool:
    """Whether the launch has left after its last checkpoint."""
    return read_note(files) == note_of(SAVED, launch)
