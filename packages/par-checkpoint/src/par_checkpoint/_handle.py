"""What `save` returns: a save, done or under way."""

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._torch_private import not_compiled

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@cache
def _under_way() -> "weakref.WeakSet[threading.Thread]":
    """The threads of saves in the background, which the interpreter awaits when the main thread is done.

    It would do so by itself, but only after it has shut all executors down: a store's client looks names up in one, and
    we have ours.
    """
    import concurrent.futures.thread  # noqa: F401, PLC0415 - registers what it does at exit: the last to do so is first

    threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def wait() -> None:
        for thread in list(threads):
            thread.join()

    threading._register_atexit(wait)  # type: ignore[attr-defined]
    return threads


class Save:
    """A save, done or under way.

    Args:
        path: The checkpoint's folder.
        timeout: Seconds that the save waits for a rank that does not answer.

    Attributes:
        blocked_seconds: Seconds for which `save`, `wait_for_copy` and optimizers that waited for the copy kept the
            trainer.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.path = path
        self.timeout = timeout
        self.blocked_seconds = 0.0
        self._caller = threading.current_thread()
        self._thread: threading.Thread | None = None
        self._copied: threading.Event | None = None
        self._hook: RemovableHandle | None = None
        self._error: BaseException | None = None
        self._heard = False
        self._last_acts: list[Callable[[], object]] = []
        self._ending = threading.Lock()
        self._tiers: threading.Thread | None = None
        self._tiers_error: BaseException | None = None
        self._tiers_heard = False
        self._tiers_acts: list[Callable[[], object]] = []
        self._tiers_ended = True
        self._missing: tuple[str, ...] = ()
        self._ended = True

    @property
    def missing(self) -> tuple[str, ...]:
        """The checkpoint's folders in tiers after the first that do not have it yet, the nearest first."""
        return self._missing

    def done(self) -> bool:
        """Whether the save has ended, well or not, in all tiers."""
        return self._written() and (self._tiers is None or not self._tiers.is_alive())

    def wait_for_copy(self) -> None:
        """Waits until weights and optimizer state may change again; cheap where they may already.

        Only after `copy="background"` is there something to wait for, and every torch optimizer's `step` waits by
        itself. Not collective; what goes wrong is raised by `wait`.
        """
        self._wait_for_copy()
        self._unhook()

    def wait(self) -> None:
        """Waits until the checkpoint is complete, in all tiers. Not collective: every rank may call it, or only some.

        Raises:
            CheckpointError, OSError: It could not be written; what was there before is still there. Each call raises
                it, and so does the next save or load, on all ranks, if any rank has not called this by then.
        """
        error, _ = self._hear()
        if error is not None:
            raise error
        error, _ = self._hear_of_tiers()
        if error is not None:
            raise error

    def _is_for(self, thread: threading.Thread) -> bool:
        """Whether a thread is to hear what goes wrong: it has called `save`, or the one that has is gone."""
        return thread is self._caller or not self._caller.is_alive()

    def _join(self) -> None:
        """Waits for the end, and raises nothing."""
        if self._thread is not None:
            self._thread.join()

    def _hear(self) -> tuple[BaseException | None, bool]:
        """Waits for the end; from now on the trainer has heard of what went wrong, on this rank.

        Returns:
            What went wrong, and whether the trainer had heard of all that did.
        """
        self._join()
        atexit.unregister(self._write_error)
        self._unhook()
        before, self._heard = self._heard, True
        return self._error, before or self._error is None

    def _copy_on(self, copy: Callable[[], None], before: threading.Thread | None) -> None:
        """Goes on in a thread of its own with copies to the next tiers, once the first one is there.

        Args:
            copy: Makes the copies; not called if the save has failed.
            before: The thread of copies that are to be made before.
        """

        def run() -> None:
            if before is not None:
                before.join()
            self._join()
            try:
                if self._error is None:
                    copy()
                while not self._tiers_ended:
                    with self._ending:
                        acts, self._tiers_acts = self._tiers_acts, []
                        self._tiers_ended = not acts
                    for act in acts if self._error is None else ():
                        act()
            except BaseException as error:  # raised by wait() or by the next save, or written to stderr at exit
                self._tiers_error = error
            finally:
                self._tiers_ended = True

        self._tiers_ended = False
        atexit.register(self._write_tiers_error)
        self._tiers = threading.Thread(target=run, name="par-checkpoint-tiers")
        _under_way().add(self._tiers)
        self._tiers.start()

    def _written(self) -> bool:
        """Whether the first tier is written, or will not be."""
        return self._thread is None or not self._thread.is_alive()

    def _tiers_thread(self) -> threading.Thread | None:
        """The thread of copies to the next tiers."""
        return self._tiers

    def _tiers_failed(self) -> bool | None:
        """Whether copies to the next tiers have failed, and nobody has heard of it; None while they are being made."""
        if self._tiers is not None and self._tiers.is_alive():
            return None
        return self._tiers_error is not None and not self._tiers_heard

    def _hear_of_tiers(self) -> tuple[BaseException | None, bool]:
        """What `_hear` gives, of the copies to the next tiers."""
        if self._tiers is not None:
            self._tiers.join()
        atexit.unregister(self._write_tiers_error)
        before, self._tiers_heard = self._tiers_heard, True
        return self._tiers_error, before or self._tiers_error is None

    def _write_tiers_error(self) -> None:
        """Writes an error of copies that nobody has asked for to stderr, at exit."""
        if self._tiers is not None:
            self._tiers.join()
        if self._tiers_error is not None and not self._tiers_heard:
            sys.stderr.write(f"par-checkpoint: {self.path!r} is whole, but not in all tiers: {self._tiers_error}\n")

    def _at_end(self, act: Callable[[], object]) -> None:
        """Has something called when the checkpoint is there: by the thread that writes it, or now if there is none.

        What it raises counts as an error of the save. Nothing is called after a save that has failed.
        """
        with self._ending:
            if not self._ended:
                self._last_acts.append(act)
                return
        if self._error is None:
            act()

    def _at_last(self, act: Callable[[], object]) -> None:
        """Has something called when the checkpoint is in all tiers, as `_at_end` does when it is in the first one."""
        if self._tiers is None:
            self._at_end(act)
            return
        with self._ending:
            if not self._tiers_ended:
                self._tiers_acts.append(act)
                return
        if self._error is None and self._tiers_error is None:
            act()

    def _start(self, work: Callable[[threading.Event], None], *, copied: bool) -> None:
        """Goes on in a thread; the interpreter waits for it at exit.

        Args:
            work: What to do in the thread; it sets the event as soon as the copy is made.
            copied: Whether the copy is made already.
        """
        event, started = threading.Event(), threading.Event()

        def run() -> None:
            started.wait()  # whoever starts a thread waits until it runs, and then for Python's lock
            try:
                work(event)
                while not self._ended:
                    with self._ending:
                        acts, self._last_acts = self._last_acts, []
                        self._ended = not acts
                    for act in acts:
                        act()
            except BaseException as error:  # raised by wait() or by the next save, or written to stderr at exit
                self._error = error
            finally:
                self._ended = True
                event.set()

        self._ended = False
        atexit.register(self._write_error)
        if not copied:
            self._copied = event
            # Of all optimizers, for what steps may wrap the given one, or not be given at all. It cannot remove itself:
            # torch iterates over the hooks when it calls them.
            self._hook = register_optimizer_step_pre_hook(not_compiled(lambda *_: self._wait_for_copy()))
        self._thread = threading.Thread(target=run, name="par-checkpoint-save")
        _under_way().add(self._thread)
        self._thread.start()
        started.set()

    def _wait_for_copy(self) -> None:
        """Waits for the copy, if it is not made yet, and counts the seconds."""
        if self._copied is not None and not self._copied.is_set():
            begin = time.perf_counter()
            self._copied.wait()
            self.blocked_seconds += time.perf_counter() - begin

    def _unhook(self) -> None:
        """Lets optimizers step without waiting."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _write_error(self) -> None:
        """Writes an error that nobody has asked for to stderr, at exit."""
        if self._error is not None and not self._heard:
            sys.stderr.write(f"par-checkpoint: the save to {self.path!r} failed: {self._error}\n")
