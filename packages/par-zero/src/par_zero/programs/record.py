"""The recorder that turns the meter's notes of a step into its program."""

from collections.abc import Sequence
from dataclasses import replace

from ..layout.meter import Meter
from ..reduce.reducer import Reducer
from .ledger import HeldMemory, ProgramEntry, ZeroProgram
from .predict import RegisteredModel, predict_steps


class StepRecord:
    """The record of the latest step: its entries, and the memory that was allocated before it.

    Args:
        model: Module as its program sees it.
        reducer: Reducer, which owns the buffers of reductions.
        meter: Meter, which has recorded the entries.
    """

    def __init__(self, model: RegisteredModel, reducer: Reducer, meter: Meter) -> None:
        self._reducer, self._meter = reducer, meter
        # Only the reducer knows the default of this device.
        sizes = replace(model.sizes, kept_buffers=reducer.buffers.kept)
        self._model = replace(model, sizes=sizes, inflight=reducer.inflight)
        self._start = self._next = HeldMemory()
        self._has_stepped = False

    def end_step(self) -> None:
        """Record that an optimizer has stepped."""
        self._meter.note("E")
        self._has_stepped = True
        # A further optimizer of the same step extends the program, whose start remains. Otherwise a new program begins
        # with the memory that the previous step has left.
        if self._meter.end_step():
            self._start = self._next
        self._next = self._held()

    def _held(self) -> HeldMemory:
        gradients, buffers = self._reducer.gradients, self._reducer.buffers
        return HeldMemory(
            gradients=frozenset(each.chunk.name for each in gradients if each.has_memory),
            casts=frozenset(each.chunk.name for each in gradients if each.is_cast),
            filled=frozenset(each.chunk.name for each in gradients if each.waits_for_sum),
            borrowed={each.chunk.name: each.borrowed for each in gradients if each.borrowed},
            lent=tuple(sorted(buffers.gradients.sizes)),
            received=tuple(sorted(buffers.received.sizes)),
        )

    def forget(self) -> None:
        """Forget the entries of the current step, because a pass has failed."""
        self._meter.forget()
        self._next = self._held()

    @property
    def last(self) -> ZeroProgram | None:
        """Program of the latest step; before the first step, the program that is predicted for a step."""
        if not self._has_stepped:
            return self.predict()[-1]
        if not self._meter.done:
            return None
        entries = tuple(ProgramEntry(*each) for each in self._meter.done)
        return replace(self._model.sizes, entries=entries, start=self._start)

    def predict(self, passes: Sequence[bool] = (True,)) -> list[ZeroProgram]:
        """Return the programs of the first steps of a module that has not run: see `predict_steps`."""
        return predict_steps(self._model, passes=passes)
