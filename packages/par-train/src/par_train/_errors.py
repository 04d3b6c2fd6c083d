"""The one error that a reader of the command line can mend."""


class UserError(ValueError):
    """A mistake in what the caller gave: shown as one line without a traceback, exit code 2.

    The message names the value, the rule it breaks and a remedy.
    """
