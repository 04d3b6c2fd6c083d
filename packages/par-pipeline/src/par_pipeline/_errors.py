"""What went wrong in a step, where, and for whom."""

from typing import NamedTuple

from .schedules.actions import Action

_LONGEST = 300  # bytes of text: a failure fits into the header of any message


class PipelineError(RuntimeError):
    """A step that failed, on this rank or another one; all ranks of the pipeline raise. `reset()` makes it usable."""


class Failure(NamedTuple):
    """The cause of a failed step, as every rank hears of it.

    Args:
        rank: The rank where it happened, within the pipeline.
        where: What that rank was about; "" if it had not begun.
        kind: The name of the exception's type.
        text: The exception's message.
    """

    rank: int
    where: str
    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int, doing: Action | str | None) -> "Failure":
        """What an exception on this rank becomes for the others; news of a peer's failure stays as it is.

        Args:
            error: The exception.
            rank: This rank.
            doing: The action under way, or in words what comes after all of them; None if none had begun.
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
        """What every rank raises. A mistake in the arguments of a step stays a ValueError or TypeError."""
        mistakes = {"ValueError": ValueError, "TypeError": TypeError}
        if not self.where and self.kind in mistakes:
            return mistakes[self.kind](f"rank {self.rank}: {self.text}")
        where = self.where or f"rank {self.rank}, before its first action"
        remedy = "Call reset() on all ranks, and zero the gradients, before the next step"
        return PipelineError(f"{where}: {self.kind}: {self.text}. {remedy}")


class DataEnded(Exception):  # noqa: N818 - an end, which is no error if it comes on all ranks
    """The data iterator of this rank has ended. It is never seen outside."""


class PeerFailed(Exception):  # noqa: N818 - it passes on the news, and is never seen outside
    """Another rank says that the step failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure
