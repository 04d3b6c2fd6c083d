"""How far a launch has come in its folder, noted in the lock file: for the launcher, and for ranks started again.

torch's launcher gives each launch an id, and keeps it when it starts the ranks again after a failure.
"""

import os

from .files import RunFiles
from .lock import read_note

BEGUN, NEAR, SAVED = "begun", "near", "saved"


def is_restarted() -> bool:
    """Whether torchrun has started this rank again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def note_of(state: str, launch: str | None = None) -> str:
    """The note that a launch has come to that state.

    Args:
        state: `BEGUN`, when the folder belongs to this launch, `NEAR`, when its last checkpoint is in the first tier
            alone, or `SAVED`, when it is written wherever it should be.
        launch: The launcher's id; default: the id of the launch that this rank belongs to.
    """
    return f"{state} by job {os.environ.get('TORCHELASTIC_RUN_ID', 'unknown') if launch is None else launch}"


def has_begun(files: RunFiles) -> bool:
    """Whether the folder belongs to this rank's launch, from an earlier start of its ranks."""
    return read_note(files) in map(note_of, (BEGUN, NEAR, SAVED))


def has_come_to(state: str, files: RunFiles, launch: str) -> bool:
    """Whether the launch has left in that state, such as `SAVED`."""
    return read_note(files) == note_of(state, launch)
