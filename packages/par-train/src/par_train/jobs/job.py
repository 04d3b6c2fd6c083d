"""How far a job has come in its output folder, noted in the lock file: for the launcher, and for ranks started again.

torch's launcher gives each job an id, and keeps it when it starts the ranks again.
"""

import os

from ..run.files import RunFiles
from ..run.lock import read_note

BEGUN, SAVED = "begun", "saved"


def is_restarted() -> bool:
    """Whether torchrun has started this rank again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def note_of(state: str, job: str | None = None) -> str:
    """The note that a job has come to that state.

    Args:
        state: `BEGUN`, when the folder is its own, or `SAVED`, when its last checkpoint is written.
        job: Its id; else that of this rank's job.
    """
    return f"{state} by job {os.environ.get('TORCHELASTIC_RUN_ID', 'unknown') if job is None else job}"


def has_begun(files: RunFiles) -> bool:
    """Whether the folder is that of this rank's job, from an earlier start."""
    return read_note(files) in (note_of(BEGUN), note_of(SAVED))


def has_saved(files: RunFiles, job: str) -> bool:
    """Whether a job has left after its last checkpoint."""
    return read_note(files) == note_of(SAVED, job)
