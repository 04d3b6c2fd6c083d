"""Training that goes on in the same processes after a rank is lost.

A step has two halves. In the first one, nothing changes that the ranks keep: forward, backward, the reduction of
gradients. `ready`, one all-reduce of three numbers, ends it. In the second half each rank updates its weights alone. So
if a rank is lost before any rank has passed `ready`, all do the step again. If some rank has passed it, all can and do
finish the step.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from par_checkpoint import State, reshard
from par_groups import Members, get_logger
from par_precision import MixedOptimizer

from .._torch_private import import_compiler
from ..strategy.execute import rows_of
from ..strategy.options import StrategyOptions
from ..strategy.strategy import Strategy

Loss = Tensor | tuple[Tensor, Tensor | float]

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


class _Told(NamedTuple):
    """Report of a rank at the beginning of an epoch. All items are sent as fp64 numbers.

    Args:
        steps: The steps that its weights have; -1 for a rank without weights.
        passed: The last step whose `ready` it has seen end; -1 before the first one.
        loss: The sum of the losses of all samples of that step.
        samples: The number of these samples.
    """

    steps: float
    passed: float
    loss: float
    samples: float


class _StepUndone(Exception):  # noqa: N818 - no error of the caller
    """A rank was lost before any rank passed `ready`, so that the step has to be done again."""


class StateLostError(RuntimeError):
    """All ranks that held a part of the state are lost, so the run has to start again from its checkpoint."""


class _RunOver(Exception):  # noqa: N818 - no error of the caller
    """The other ranks have ended the run."""


class SurvivedStep:
    """One optimizer step of a run that survives the loss of ranks.

    Args:
        survivors: The run.
        number: The number of the step, from 0.

    Attributes:
        number: The number of the step, from 0.
    """

    def __init__(self, survivors: "Survivors", number: int) -> None:
        self._survivors, self.number = survivors, number

    def run(self, loss_of: Callable[[nn.Module, Any], Loss]) -> float:
        """Do the step until it counts: read a batch, forward, backward, update. Collective.

        Args:
            loss_of: A function of the model and this rank's part of the batch. It returns the mean loss of its rows, or
                the sum of the losses and the number of items that they are of. It may run several times in one step.

        Returns:
            The mean loss over the whole batch.

        Raises:
            RuntimeError: No rank is left that holds the state.
        """
        return self._survivors.run(self.number, loss_of)


class Survivors:
    """A training run that goes on when a rank is lost. As a context manager it starts and ends the run.

    Start the ranks with a keeper: `python -m par_groups.elastic --ranks 4 -- python train.py`. All ranks are replicas
    of one model (ZeRO 0, data parallelism over gloo). When a rank is lost, the others form a new group within moments,
    build the objects again and move their state into them, in memory. The batch is then shared by the ranks that are
    left. A step counts on all ranks or is done again on all of them.

    A move needs memory for two copies of the state of a rank. Each step copies the model's buffers at its beginning.

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
        _check_options(StrategyOptions(**{**options, "uneven_batches": True}))
        self._build, self._joins, self._timeout = build, spares == "join", timeout
        self._options = {**options, "uneven_batches": True}
        import_compiler()  # before this rank arrives, because the others wait for one that has arrived
        self._members = Members()
        self.strategy: Strategy | None = None
        self.state: TrainState | None = None
        self._told = _Told(steps=-1, passed=_NOTHING, loss=0.0, samples=1.0)
        self._every: list[_Told] = []  # what all members have reported in the current epoch
        self._has_formed = False  # an epoch whose objects do not exist yet
        self._position: dict[str, Any] = {}  # of the data, at the beginning of the current step
        self._sums = torch.zeros(3, dtype=torch.float64)  # what `ready` sums: spares that wait, losses, samples
        self._is_ready = False

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
            done = int(self._told.steps)
            yield SurvivedStep(self, done)
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
            if self._has_formed or self._members.is_broken(0) or (self._joins and self._sums[0] > 0):
                self._renew()
        except _RunOver:
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
        optimizer = _mixed(state.optimizer)
        loader = state.loader
        self._is_ready = False
        # What the first half of a step may change has to return to its value if the step does not count.
        buffers = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
        scaling = optimizer.scaling.state_dict()
        counts = False
        try:
            self._at("forward")
            batch = next(iter(loader))
            given = loss_of(state.model, batch)
            if not isinstance(given, tuple):
                given = given * rows_of(batch), float(rows_of(batch))
            total, count = given
            self._at("backward")
            # The optimizer makes the mean over all samples of all ranks from means and weights, however the batch is
            # shared.
            strategy.backward(total / count, optimizer, weight=count)
            self._sums = torch.tensor([self._members.spares, float(total.detach()), float(count)], dtype=torch.float64)
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
        self._at("updated")

    def _agree(self, number: int) -> None:
        """End the first half of a step: after this all ranks take it, or all do it again.

        Raises:
            _StepUndone: A rank is lost, and no rank has passed this point; the next epoch has begun.
        """
        self._at("reduced")
        self._is_ready = True
        try:
            dist.all_reduce(self._sums)
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
        if isinstance(error, _RunOver) or not self._members.is_broken():
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

    def _form(self) -> _Told:
        """Form the next epoch and return the report of the rank that is furthest."""
        while True:
            if self._members.form(self._timeout) is None:
                raise _RunOver
            try:
                self._at("formed")
                own = torch.tensor(self._told, dtype=torch.float64)
                every = [torch.empty_like(own) for _ in self._members.ranks]
                dist.all_gather(every, own)
            except RuntimeError as error:
                self._leave_after(error)
                continue
            self._every = [_Told(*numbers) for numbers in torch.stack(every).tolist()]
            if self._told.steps < 0 and any(each.steps >= 0 for each in self._every):
                # If all ranks with a state die now, this rank must not begin the run again as if there had been none.
                self._told = self._told._replace(passed=-1.0)
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
        old = self.strategy
        strategy = Strategy(**self._options)
        try:
            if strategy.device.type != "cpu":
                raise _no_nccl(strategy.device.type)
            state = self._made(strategy)
            self._at("built")
            if newest >= 0:
                # A rank that has been away has an old state, which is none.
                has_state = self._told.steps == newest and self.state is not None
                source = self._parts(self.state) if has_state and self.state is not None else State()
                extra = reshard(source, self._parts(state)).extra
                self._position = extra["position"]
                state.loader.load_state_dict(self._position)
                strategy.steps = int(newest)
            else:
                self._position = state.loader.state_dict()
            self._at("moved")
        except BaseException:
            strategy.close()
            raise
        # The old objects are kept until here: a further loss on the way would need them.
        self.state, self.strategy, self._has_formed = state, strategy, False
        self._told = self._told._replace(steps=max(newest, 0.0), passed=max(passed, -1.0))
        if old is not None:
            old.close()
        gc.collect()  # objects that refer to each other would keep the threads of their groups

    def _made(self, strategy: Strategy) -> TrainState:
        made = self._build(strategy)
        if not isinstance(made, TrainState):
            raise TypeError(f"build() returned a {type(made).__name__}; return a par_train.TrainState")
        model, optimizer, loader, *schedulers = strategy.initialize(
            made.model, made.optimizer, made.loader, *made.schedulers
        )
        state = TrainState(model=model, optimizer=optimizer, loader=loader, schedulers=schedulers)
        # The last hook before the update: gradients are complete and summed, and nothing has changed yet.
        _mixed(optimizer).inner.register_step_pre_hook(lambda *_: self._agree(int(self._told.steps)))
        return state

    def _parts(self, state: TrainState) -> State:
        scheduler = [_mixed(state.optimizer).scaling, *state.schedulers]
        extra = {"position": self._position}
        return State(model=state.model, optimizer=state.optimizer, scheduler=scheduler, extra=extra)

    def _at(self, phase: str) -> None:
        """Report progress, since a rank that reports none for long is taken for hung; `phase` is for tests."""
        del phase
        self._members.report()


def _mixed(optimizer: Optimizer) -> MixedOptimizer:
    if not isinstance(optimizer, MixedOptimizer):
        raise ValueError(
            f"a plugin controls precision, and {type(optimizer).__name__} does not sum weights of losses; remove the "
            "plugin to survive the loss of a rank"
        )
    return optimizer


def _no_nccl(device: str) -> ValueError:
    return ValueError(
        f"device={device!r}: survivors need gloo, because an abort of an NCCL communicator does not reach the "
        "communicators split from it, and a rank that waits there would hang; pass device='cpu', or let the launcher "
        "start the job again from its checkpoint"
    )


def _check_options(options: StrategyOptions) -> None:
    """Raise ValueError for options with which the loss of a rank is not survived."""
    device = options.device if options.device != "auto" else "cpu"
    if torch.device(device).type != "cpu":
        raise _no_nccl(options.device)
    if options.parallel is not None and (
        not isinstance(options.parallel, Mapping)
        or any(
            (given.get("size", 1) if isinstance(given, Mapping) else given) != 1
            for axis, given in options.parallel.items()
            if axis != "data"
        )
    ):
        raise ValueError(
            f"parallel={options.parallel!r}: only data-parallel replicas of one rank survive the loss of a rank; "
            "remove it, or let the launcher start the job again from its checkpoint"
        )
    if options.stage:
        raise ValueError(
            f"zero={options.stage}: a lost rank would take its shard with it, and no rank has a copy; use zero=0"
        )
    if options.numerics != "ordinary":
        raise ValueError(
            f"numerics={options.numerics!r}: lanes must divide by the data ranks, whose number changes with a loss; "
            "use numerics='ordinary'"
        )
    if options.memory is not None or "offload" in options.zero_keywords:
        raise ValueError(
            f"memory={options.memory!r}, zero={options.zero!r}: offloaded state does not move in memory after a loss; "
            "remove memory and offload"
        )
