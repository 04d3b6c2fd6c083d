"""Handle that `save` returns, of a finished or running save."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._torch_private import not_compiled
from .transfer.background import BackgroundTask

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class Save:
    """A save, done or under way.

    Args:
        path: The checkpoint's folder.
        timeout: Seconds that the save waits for a rank that does not answer.

    Attributes:
        blocked_seconds: Seconds for which `save`, `wait_for_copy` and optimizers that waited for the copy blocked the
            trainer.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.path = path
        self.timeout = timeout
        self.blocked_seconds = 0.0
        # What goes on in the background, in the order in which it ends: the write, and copies to further tiers.
        self._tasks: list[BackgroundTask] = []
        self._missing: tuple[str, ...] = ()
        self._copied: threading.Event | None = None
        self._hook: RemovableHandle | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """Folders of the checkpoint in the tiers where it is not complete yet, nearest tier first."""
        return self._missing

    def done(self) -> bool:
        """Return whether the save has ended in all tiers, with or without an error."""
        return all(task.done() for task in self._tasks)

    def wait_for_copy(self) -> None:
        """Wait until weights and optimizer state may change again; this is cheap if they may already.

        Only a save with `Transfer(copy="background")` makes it wait, and the `step` of every torch optimizer calls it.
        It is not collective. `wait` raises the errors.
        """
        self._wait_for_copy()
        self._unhook()

    def wait(self) -> None:
        """Wait until the checkpoint is complete in all tiers. Not collective: all ranks or some of them may call it.

        Raises:
            CheckpointError, OSError: Writing failed; an earlier checkpoint at the path is unchanged. Each call raises
                it. The next save or load raises it on all ranks if some rank has not called this by then.
        """
        for task in self._tasks:
            error, _ = task.hear()
            if error is not None:
                raise error

    def _write(self, work: Callable[[threading.Event], None], *, copied: bool) -> BackgroundTask:
        """Write in the background.

        Args:
            work: Function to run; it sets the event as soon as this rank's copy is made.
            copied: Whether the copy is already made.
        """
        event = threading.Event()

        def write() -> None:
            try:
                work(event)
            finally:
                event.set()  # or an optimizer would wait forever for the copy of a save that has failed

        task = BackgroundTask("par-checkpoint-save", f"the save to {self.path!r} failed", self._unhook)
        if not copied:
            self._copied = event
            # Of all optimizers, for what steps may wrap the given one, or not be given at all. It cannot remove itself:
            # torch iterates over the hooks when it calls them.
            self._hook = register_optimizer_step_pre_hook(not_compiled(lambda *_: self._wait_for_copy()))
        task.start(write)
        self._tasks.append(task)
        return task

    def _copy_on(self, copy: Callable[[], None], before: BackgroundTask | None) -> BackgroundTask:
        """Copy to further tiers in the background, once the first tier is written.

        Args:
            copy: Makes the copies; not called if the write has failed.
            before: Copies of the save before, which must end first.
        """
        written = list(self._tasks)

        def wait_and_copy() -> None:
            for task in written if before is None else [before, *written]:
                task.join()
            if all(task.error is None for task in written):
                copy()

        task = BackgroundTask("par-checkpoint-tiers", f"{self.path!r} is whole, but not in all tiers")
        task.start(wait_and_copy)
        self._tasks.append(task)
        return task

    def _at_end(self, act: Callable[[], object]) -> None:
        """Have something called when the checkpoint is in all tiers: by the thread that ends last, or now.

        An error in it counts as an error of the save. Nothing is called after a save that has failed.
        """
        tasks = list(self._tasks)
        if not tasks:
            act()
            return
        tasks[-1].then(lambda: act() if all(task.error is None for task in tasks) else None)

    def _wait_for_copy(self) -> None:
        """Wait for the copy if it is not made yet, and count the seconds."""
        if self._copied is not None and not self._copied.is_set():
            begin = time.perf_counter()
            self._copied.wait()
            self.blocked_seconds += time.perf_counter() - begin

    def _unhook(self) -> None:
        """Let optimizers step without waiting."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
