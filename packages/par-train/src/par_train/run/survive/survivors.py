"""Training that goes on in the same processes after a rank is lost.

A step has two halves. In the first one, nothing changes that the ranks keep: forward, backward, the reduction of
gradients. `ready`, one all-reduce of three numbers, ends it. In the second half each rank updates its weights alone. So
if a rank is lost before any rank has passed `ready`, all do the step again. If some rank has passed it, all can and do
finish the step.

Under ZeRO 1 to 3 a lost rank takes its shard with it, so each rank also holds the shard of the previous rank. Before
`ready`, its gradient travels to the rank that holds the copy. Own shard and copy then take the same step.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_checkpoint import Shadow, State, reshard
from par_groups import Members, get_logger, on_written

from ..._torch_private import import_compiler
from ...strategy.execute import rows_of
from ...strategy.options import StrategyOptions
from ...strategy.strategy import Strategy
from .options import check_options, lanes_of, mean_of, mixed_of, nccl_error
from .reports import RankReport, RingPlace, before_move, is_whole
from .step import Loss, SurvivedStep, loss_and_items

_NOTHING = -2
"""`passed` before the run has begun anywhere, so that a run whose state is lost is none that begins."""

_log = get_logger(__name__)


@dataclass(kw_only=True)
class TrainState:
    """The objects of one training run on a rank.

    Args:
        model: The model.
        optimizer: The optimizer of its parameters.
        loader: The data loader, whose batch size counts the rows of all ranks together.
        schedulers: The lr schedulers of the optimizer, which step once after each step.
    """

    model: nn.Module
    optimizer: Optimizer
    loader: Any
    schedulers: list[Any] = field(default_factory=list)


class _StepUndone(Exception):  # noqa: N818 - no error of the caller
    """A rank was lost before any rank passed `ready`, so that the step has to be done again."""


class StateLostError(RuntimeError):
    """All ranks that held a part of the state are lost, so the run has to start again from its checkpoint."""


class _RunOver(Exception):  # noqa: N818 - no error of the caller
    """The other ranks have ended the run."""


class Survivors:
    """A training run that goes on when a rank is lost. As a context manager it starts and ends the run.

    Start the ranks with a keeper: `python -m par_groups.elastic --ranks 4 -- python train.py`. All ranks are data
    parallel, over gloo, at any ZeRO stage. When a rank is lost, the others form a new group within moments, build the
    objects again and move their state into them, in memory. The batch is then shared by the ranks that are left. A step
    counts on all ranks or is done again on all of them.

    At stages 1 to 3 each rank also holds a copy of the previous rank's shard: see `par_checkpoint.Shadow`. Two
    neighbours must not be lost together. A program must not write to the weights between steps, because only the
    optimizer's steps reach the copies; a load does, too, from the end of the next step on.

    A move needs memory for two copies of the state of a rank, at stages 1 to 3 until the end of the next step. Each
    step copies the model's buffers at its beginning.

    Args:
        build: A function of the `Strategy` of an epoch that makes a `TrainState`. It runs again after each loss, so it
            makes new objects each time, with the same names and shapes.
        spares: "join": a spare joins after the current step, whenever it arrives. "wait": spares join only when a rank
            is lost.
        timeout: Timeout of a collective in seconds. None: torch's default.
        **options: Fields of `StrategyOptions`; `uneven_batches` is always set.

    Attributes:
        strategy: The strategy of the current epoch.
        state: The objects of the current epoch, as `Strategy.initialize` returned them. They are new ones after a loss,
            so do not keep references to them.

    Raises:
        ValueError: An option is not supported with the loss of ranks.
        RuntimeError: No keeper has started this process.

    Example:
        def build(strategy):
            model = nn.Linear(8, 8)
            loader = DataLoader(dataset, batch_size=12, shuffle=True)
            return TrainState(model=model, optimizer=AdamW(model.parameters()), loader=loader)

        with Survivors(build, precision="bf16") as survivors:
            for step in survivors.steps(1000):
                step.run(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    """

    def __init__(
        self,
        build: Callable[[Strategy], TrainState],
        *,
        spares: Literal["join", "wait"] = "join",
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        if spares not in ("join", "wait"):
            raise ValueError(f"spares={spares!r}: it is unknown; pass 'join' or 'wait'")
        check_options(StrategyOptions(**{**options, "uneven_batches": True}))
        self._build, self._joins, self._timeout = build, spares == "join", timeout
        self._options = {**options, "uneven_batches": True}
        import_compiler()  # before this rank arrives, because the others wait for one that has arrived
        self._members = Members()
        self.strategy: Strategy | None = None
        self.state: TrainState | None = None
        self._told = RankReport(steps=-1, passed=_NOTHING, loss=0.0, samples=1.0)
        self._every: list[RankReport] = []  # what all members have reported in the current epoch
        self._has_formed = False  # an epoch whose objects do not exist yet
        self._position: dict[str, Any] = {}  # of the data, at the beginning of the current step
        # What `ready` sums: spares that wait, losses, samples, ranks whose copy cannot follow, ranks with a stale copy.
        self._sums = torch.zeros(5, dtype=torch.float64)
        self._is_ready = False
        # Of all shardings since the last step that counted, newest last.
        self._shadows: list[tuple[RingPlace, Shadow]] = []
        self._is_stale = False  # whether a load has written the state, which the copies do not have yet

    @property
    def number(self) -> int:
        """The number of this rank, which it keeps in all epochs."""
        return self._members.number

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks that are in, ascending."""
        return self._members.ranks

    def __enter__(self) -> Self:
        try:
            self._renew()
        except _RunOver:
            _log.info("the run ended before this spare was needed")
        return self

    def __exit__(self, *_: object) -> None:
        if self.strategy is not None:
            self.strategy.close()
        self._members.close()

    def steps(self, until: int) -> Iterator[SurvivedStep]:
        """Iterate over the steps that are left until a number of steps. A spare begins in the middle.

        It returns after all ranks have done all steps.

        Args:
            until: The number of steps of the whole run.
        """
        while self.state is not None and self._told.steps < until:
            done = self._told.steps
            yield SurvivedStep(self.run, done)
            if self.state is not None and self._told.steps == done:
                raise RuntimeError(f"step {done} was not run; call step.run(loss_of) in each iteration")
        try:
            self._wait_for_all()
        except _RunOver:
            return  # a rank that was lost made the others leave after this one, and they are done, too

    def run(self, number: int, loss_of: Callable[[nn.Module, Any], Loss]) -> float:
        """Do one step until it counts, as `SurvivedStep.run` describes."""
        if number != self._told.steps:
            raise RuntimeError(f"step {number} was run before; call step.run(loss_of) once in each iteration")
        try:
            while True:
                try:
                    self._attempt(number, loss_of)
                    break
                except _StepUndone:
                    self._renew()
                except Exception as error:
                    self._leave_after(error)
                    self._renew()
            # The sum of spares is equal on all ranks, so all of them renew the epoch together.
            if self._has_formed or self._members.is_broken() or (self._joins and self._sums[0] > 0):
                self._renew()
        except _RunOver:
            if not self._members.is_spare:
                # A member that has done all steps waits until the others have, too, so one has left before.
                raise RuntimeError(
                    f"step {number}: another rank has ended with exit code 0, which ends the run for all ranks; let "
                    "all ranks leave the loop at the same step, or exit with another code to leave the other ranks in"
                ) from None
            self.state = None  # the other ranks have gone on without this one, which was silent for too long
        return self._told.loss / self._told.samples

    def _wait_for_all(self) -> None:
        """Wait until all ranks have done all steps: until then one of them may need this rank's state."""
        while self.state is not None:
            try:
                dist.barrier()
                return
            except RuntimeError as error:
                self._leave_after(error)
                self._renew()

    # A step

    def _attempt(self, number: int, loss_of: Callable[[nn.Module, Any], Loss]) -> None:
        """Do a step; it counts if this returns."""
        state, strategy = self.state, self.strategy
        assert state is not None and strategy is not None  # noqa: S101, PT018 - set by the first epoch
        optimizer = mixed_of(state.optimizer)
        loader = state.loader
        self._is_ready = False
        # What the first half of a step may change has to return to its value if the step does not count.
        buffers = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
        scaling = optimizer.scaling.state_dict()
        counts = False
        try:
            self._at("forward")
            batch = next(iter(loader))
            lanes = strategy.options.canonical_lanes
            total = count = 0.0
            for lane in [batch] if lanes is None else lanes_of(batch, lanes.data // len(self.ranks)):
                given = loss_of(state.model, lane)
                loss, items = loss_and_items(given, rows_of(lane))
                total, count = total + float(loss.detach()), count + items
                self._at("backward")
                if lanes is None:
                    # The optimizer makes the mean over all items of all ranks from means and weights. A rank without
                    # items, such as one whose tokens are all masked, must add a zero and not 0 / 0.
                    strategy.backward(loss / (items or 1.0), optimizer, weight=items)
                else:  # lanes have equal numbers of rows, and a product would change the bits of the mean
                    strategy.backward(mean_of(given), optimizer)
            told = [self._members.spares, total, count, 0, self._is_stale]
            self._sums = torch.tensor(told, dtype=torch.float64)
            optimizer.step()
            if not self._is_ready:  # the gradients were not finite, and no optimizer has run
                self._agree(number)
            counts = True
        finally:
            if not counts:
                with torch.no_grad():
                    for buffer, value in buffers:
                        buffer.copy_(value)
                optimizer.scaling.load_state_dict(scaling)
        for scheduler in state.schedulers:
            scheduler.step()
        optimizer.zero_grad()
        self._told = self._told._replace(steps=number + 1)
        # Only a step that counts moves the position, so a step that is undone reads the same rows again.
        self._position = loader.state_dict()
        if len(self._shadows) > 1:
            # All ranks have moved to the newest sharding, and the others have the values of the step before.
            del self._shadows[:-1]
            gc.collect()
        self._at("updated")
        if self._sums[4] > 0 and not self._has_formed:
            self._shadow_anew()

    def _before_update(self, number: int) -> None:
        """Send gradients to the copies, agree on the step, and update the copy of the previous rank's shard."""
        if not self._shadows:
            self._agree(number)
            return
        _, shadow = self._shadows[-1]
        self._at("sending")
        self._sums[3] = not shadow.exchange_gradients()
        self._agree(number)
        shadow.step()

    def _agree(self, number: int) -> None:
        """End the first half of a step: after this all ranks take it, or all do it again.

        Raises:
            _StepUndone: A rank is lost, and no rank has passed this point; the next epoch has begun.
            ValueError: The copies cannot follow the step; on all ranks, and nothing has changed.
        """
        self._at("reduced")
        self._is_ready = True
        try:
            dist.all_reduce(self._sums)
            if self._sums[3] > 0:
                raise ValueError(
                    f"step {number}: some parameters had no gradient on any rank, so the optimizer steps parts of its "
                    "tensors, and the copies of shards cannot follow; pass the optimizer only parameters that get a "
                    "gradient, or use zero=0"
                )
            self._told = self._told._replace(passed=number, loss=float(self._sums[1]), samples=float(self._sums[2]))
        except RuntimeError as error:
            # Another rank may have seen the end of this all-reduce. It has begun to update its weights, so this rank,
            # which has all that it takes, does so as well.
            self._leave_after(error)
            furthest = self._form()
            if furthest.passed < number:
                raise _StepUndone from error
            self._told = furthest._replace(steps=number)
        self._at("passed")

    def _leave_after(self, error: Exception) -> None:
        """Leave the epoch after an error that the loss of a rank explains; raise any other error again."""
        if isinstance(error, _RunOver) or not self._members.is_broken(error):
            raise error
        _log.warning("a rank is lost in epoch %d: %s", self._members.epoch, str(error).partition("\n")[0][:120])
        self._has_formed = False
        self._members.abandon()

    # An epoch

    def _renew(self) -> None:
        """Form the next epoch and move the state into its objects, again for each rank that is lost on the way."""
        while True:
            if not self._has_formed:
                self._form()
            try:
                self._move()
                return
            except Exception as error:
                self._leave_after(error)

    def _form(self) -> RankReport:
        """Form the next epoch and return the report of the rank that is furthest."""
        while True:
            if self._members.form(self._timeout) is None:
                raise _RunOver
            try:
                self._at("formed")
                # A copy that misses what a load has written is none.
                cuts = () if self._is_stale else tuple(cut for cut, _ in self._shadows)
                every: list[Any] = [None] * len(self._members.ranks)
                dist.all_gather_object(every, self._told._replace(cuts=cuts, is_ready=self._is_ready))
            except RuntimeError as error:
                self._leave_after(error)
                continue
            self._every = before_move(every)
            if self._told.steps < 0 and any(each.steps >= 0 for each in self._every):
                # If all ranks with a state die now, this rank must not begin the run again as if there had been none.
                self._told = self._told._replace(passed=-1)
            self._has_formed = True
            self._at("told")
            return max(self._every, key=lambda each: each.passed)

    def _move(self) -> None:
        """Make the objects of the epoch that was formed, and move the state of the run into them. Collective."""
        newest = max(each.steps for each in self._every)
        passed = max(each.passed for each in self._every)
        if newest < 0 and passed > _NOTHING:
            raise StateLostError(
                "all ranks that had the state of the run are lost; start the job again from its checkpoint, which "
                "Strategy.checkpoints().resume() loads"
            )
        holders = [each.cuts for each in self._every if each.steps == newest]
        if newest >= 0 and StrategyOptions(**self._options).stage and not is_whole(holders):
            raise StateLostError(
                "a rank and the next one, which held the copy of its shard, are lost "
                "together; start the job again from its checkpoint, which Strategy.checkpoints().resume() loads"
            )
        old = self.strategy
        # A rank that has been away has an old state, which is none.
        has_state = newest >= 0 and self._told.steps == newest and self.state is not None
        strategy = Strategy(**self._options)
        try:
            if strategy.device.type != "cpu":
                raise nccl_error(strategy.device.type)
            state = self._made(strategy)
            self._at("built")
            if newest >= 0:
                source = self._source(self.state) if has_state and self.state is not None else State()
                extra = reshard(source, self._parts(state)).extra
                self._position = extra["position"]
                state.loader.load_state_dict(self._position)
                strategy.steps = newest
            else:
                self._position = state.loader.state_dict()
            shadow = Shadow(state.model, mixed_of(state.optimizer).inner) if strategy.options.stage else None
            self._at("moved")
        except BaseException:
            strategy.close()
            raise
        # The old objects are kept until here: a further loss on the way would need them.
        self.state, self.strategy, self._has_formed = state, strategy, False
        self._told = self._told._replace(steps=max(newest, 0), passed=max(passed, -1))
        if shadow is not None:
            # A rank may fail in this move after another has ended it, and both must find one whole sharding then.
            if not has_state:
                self._shadows.clear()
            cut = RingPlace(self._members.epoch, self._members.place, len(self._members.ranks))
            self._shadows.append((cut, shadow))
            self._watch_loads(state)
        if old is not None:
            old.close()
        # Objects of the old epoch refer to each other, and keep the threads and sockets of its groups.
        gc.collect()

    def _made(self, strategy: Strategy) -> TrainState:
        made = self._build(strategy)
        if not isinstance(made, TrainState):
            raise TypeError(f"build() returned a {type(made).__name__}; return a par_train.TrainState")
        model, optimizer, loader, *schedulers = strategy.initialize(
            made.model, made.optimizer, made.loader, *made.schedulers
        )
        state = TrainState(model=model, optimizer=optimizer, loader=loader, schedulers=schedulers)
        inner = mixed_of(optimizer).inner
        # The last hook before the update: gradients are complete and summed, and nothing has changed yet. The method of
        # the class registers it behind par-zero's hook, in which ranks may still exchange which gradients exist.
        Optimizer.register_step_pre_hook(inner, lambda *_: self._before_update(self._told.steps))
        inner.step = self._update_of(inner.step)  # type: ignore[method-assign]
        return state

    def _update_of(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return an optimizer's step that counts if a rank is lost while updated parameters travel."""

        @wraps(step)
        def update(*args: Any, **keywords: Any) -> Any:
            try:
                return step(*args, **keywords)
            except (RuntimeError, TypeError) as error:
                # Before `ready` the step is done again. After it each shard and its copy are updated before the first
                # message is sent, and the next epoch gathers the parameters. torch raises a TypeError for a group that
                # was destroyed, as it is once the next epoch has been formed.
                if self._told.passed != self._told.steps or (isinstance(error, TypeError) and not self._has_formed):
                    raise
                if not self._has_formed:
                    self._leave_after(error)

        return update

    def _source(self, state: TrainState) -> State:
        """Return what this rank holds of the run."""
        parts = self._parts(state)
        if not self._shadows:
            return parts
        *before, (_, newest) = self._shadows
        held = newest.held_state([shadow for _, shadow in before])
        return replace(parts, model=held.model, optimizer=held.optimizer)

    def _watch_loads(self, state: TrainState) -> None:
        """Record when a load writes the state of the current objects."""
        inner = mixed_of(state.optimizer).inner
        held = [tensor for group in inner.param_groups for tensor in group["params"]]

        def note(_: object) -> None:
            self._is_stale = True

        self._is_stale = False
        on_written([*state.model.parameters(), *held], note)

    def _shadow_anew(self) -> None:
        """Copy the shards again after a load. Collective."""
        state, (cut, _) = self.state, self._shadows[-1]
        assert state is not None  # noqa: S101 - a step has run
        try:
            self._shadows = [(cut, Shadow(state.model, mixed_of(state.optimizer).inner))]
            self._is_stale = False
        except RuntimeError as error:
            self._leave_after(error)

    def _parts(self, state: TrainState) -> State:
        scheduler = [mixed_of(state.optimizer).scaling, *state.schedulers]
        extra = {"position": self._position}
        return State(model=state.model, optimizer=state.optimizer, scheduler=scheduler, extra=extra)

    def _at(self, phase: str) -> None:
        """Report progress, since a rank that reports none for long is taken for hung; `phase` is for tests."""
        del phase
        self._members.report()
