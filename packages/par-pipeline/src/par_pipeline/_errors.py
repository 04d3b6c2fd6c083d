"""Errors of a step: the cause, the rank and action where it happened, and the exception that all ranks raise."""

from typing import NamedTuple

from .schedules.actions import Action

_LONGEST = 300  # bytes of text: a failure fits into the header of any message


class PipelineError(RuntimeError):
    """Error of a failed step, raised on all ranks of the pipeline. `reset()` makes the pipeline usable again."""


class Failure(NamedTuple):
    """Cause of a failed step, as sent to every rank.

    Args:
        rank: Rank of the failure, within the pipeline.
        where: Action of that rank at the failure, in words; "" before its first action.
        kind: Name of the exception's type.
        text: Message of the exception.
    """

    rank: int
    where: str
    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int, doing: Action | str | None) -> "Failure":
        """Return the failure that this rank sends to the other ranks. A failure received from a peer stays unchanged.

        Args:
            error: Exception on this rank.
            rank: This rank.
            doing: Current action, or words for the work after the last action; None before the first action.
        """
        from par_groups import error_text  # noqa: PLC0415 - it needs torch, and schedules do without

        if isinstance(error, PeerFailed):
            return error.failure
        text = error_text(error).encode()[:_LONGEST].decode(errors="ignore").rstrip(".")
        where = ""
        if isinstance(doing, Action):
            where = f"stage {doing.stage}, microbatch {doing.microbatch}, action {doing} on rank {rank}"
        elif doing is not None:
            where = f"rank {rank}, after its last action, {doing}"
        return cls(rank, where, type(error).__name__, text)

    def error(self) -> Exception:
        """Return the exception that every rank raises. For an invalid argument, it stays a ValueError or TypeError."""
        mistakes = {"ValueError": ValueError, "TypeError": TypeError}
        if not self.where and self.kind in mistakes:
            return mistakes[self.kind](f"rank {self.rank}: {self.text}")
        where = self.where or f"rank {self.rank}, before its first action"
        remedy = "Call reset() on all ranks, and zero the gradients, before the next step"
        return PipelineError(f"{where}: {self.kind}: {self.text}. {remedy}")


class DataEnded(Exception):  # noqa: N818 - an end, which is no error if it comes on all ranks
    """End of this rank's data iterator; internal, never raised to callers."""


class PeerFailed(Exception):  # noqa: N818 - it passes on the news, and is never seen outside
    """Failure of the step, received from another rank; internal, never raised to callers."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure
