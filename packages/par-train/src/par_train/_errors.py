"""The errors that are shown as one line without a traceback."""


class UserError(ValueError):
    """A mistake in what the caller gave: exit code 2.

    The message names the value, the rule it breaks and a remedy.
    """


class TrainingError(RuntimeError):
    """Training began, and cannot go on: exit code 1. All ranks raise it alike."""
