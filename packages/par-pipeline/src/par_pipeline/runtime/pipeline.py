"""`Pipeline`: runs any valid schedule on real processes."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from statistics import median
from time import perf_counter
from traceback import clear_frames
from typing import Any, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import accelerator_of, backend_of

from .._errors import DataEnded, Failure, PeerFailed, PipelineError
from .._program import LOSS, WELL, Program, compile_program, sum_message
from .._structure import flatten
from ..analysis.timeline import Timeline
from ..schedules.schedule import Schedule
from ..schedules.walk import Event
from ..wire.message import NOTHING
from ..wire.wire import WaitFor, Wire
from .agreement import Terms, agree_on, check, digest, split_stages
from .clock import clock_of
from .feed import make_feed, shares
from .gradient_sync import GradientSync
from .local_stage import LocalStage, across_border
from .microbatches import Batch, Result, Split, merge, split_rows
from .offload import ActivationOffload, Activations
from .options import DEFAULT_TRANSPORT, LossWeight, SplitWhere, Transport
from .run import Equipment, Loss, Recorded, StepExecution
from .shared import Cuts, Shared, check_shared
from .weight_gradients import SplitBackward


class Pipeline:
    """Model whose stages are on different ranks. The constructor and the methods are collective over the group.

    Args:
        stages: Stage of this rank, or its stages, ascending. Each stage is called with the output of the stage before:
            any nesting of tensors and plain values; a tuple is several arguments.
        schedule: Schedule for as many ranks as the group has; equal on all ranks.
        group: Ranks of the pipeline, first to last.
        loss_fn: Function `loss_fn(output, target)`, or `loss_fn(output)` without a target, which returns the mean over
            the rows of a microbatch. Only the rank with the last stage needs it.
        split: Function that splits a batch into microbatches. Default: along dim 0, in sizes that differ by at most 1.
        weight: Weight of a microbatch's loss. Default: its number of rows.
        shared: Parameters used by several stages; their gradients are summed at the end of each step.
        offload: Options for offloading activations. Default: activations stay on the device.
        broadcast_loss: Whether every rank receives the loss after all ranks have reached the end of the step. A step
            then succeeds on all ranks or on none. Without it, an error of a higher rank may end the next step of a
            lower rank. Default: False.
        complete: Function to begin a reduction; it is called with a stage's number when its gradients are complete.
        split_backward: Policy for a stage whose backward the schedule splits, but whose weight gradients cannot be
            deferred: stages under FSDP2 or torch.compile, and torch's RNNs. "required" raises ValueError. "where
            possible" computes the complete backward in the first half and warns. Default: "required".
        transport: Options for the transfer of tensors between the ranks.

    Raises:
        ValueError, TypeError: The arguments are invalid or do not match; raised on every rank.

    Example:
        pipeline = Pipeline(my_stage, one_f_one_b(4, 16), groups["pipeline"], loss_fn=nn.functional.cross_entropy)
        loss, _ = pipeline.step(tokens, target=labels)
        optimizer.step()
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup,
        *,
        loss_fn: Loss | None = None,
        split: Split = split_rows,
        weight: LossWeight | None = None,
        shared: Sequence[Shared] = (),
        offload: ActivationOffload | None = None,
        broadcast_loss: bool = False,
        complete: Callable[[int], None] | None = None,
        split_backward: SplitWhere = "required",
        transport: Transport = DEFAULT_TRANSPORT,
    ) -> None:
        self.schedule, self.group = schedule, group
        self._split, self._weight, self._shared = split, weight, shared
        self._broadcasts_loss = broadcast_loss
        self.rank = dist.get_rank(group)
        problem: Exception | None = None
        terms = Terms("", has_loss=False, broadcasts_loss=False, holders=())
        try:
            if split_backward not in get_args(SplitWhere):
                raise ValueError(f"split_backward is {split_backward!r}; give 'required' or 'where possible'")
            check_shared(shared)
            transport.check()
            modules = [stages] if isinstance(stages, nn.Module) else list(stages)
            self.stages = dict(zip(check(modules, schedule, group, self.rank), modules, strict=True))
            splittable = split_stages(self.stages, schedule, self.rank, split_backward)
            syncs = {number: GradientSync(module) for number, module in self.stages.items()}
            terms = Terms(
                digest=digest(schedule),
                has_loss=loss_fn is not None,
                broadcasts_loss=broadcast_loss,
                holders=tuple(each.holders_in(group) for each in shared),
            )
        except Exception as error:  # of any type: the others wait for this rank
            problem = error
        # Every rank takes part in this exchange, also one that has just failed: otherwise the other ranks would wait in
        # it until their timeout.
        have_loss = agree_on(terms, problem, group)
        last = schedule.stages - 1
        self._has_loss = have_loss[schedule.rank_of(last)]
        self._equipment = Equipment(
            stages={
                # A stage drops its outputs after the send to free their memory. DDP with find_unused_parameters is the
                # exception: it walks the graph from these outputs before the last backward.
                number: LocalStage(module, keeps_outputs=syncs[number].follows_graph)
                for number, module in self.stages.items()
            },
            split=SplitBackward(splittable),
            syncs=syncs,
            wire=Wire(
                group,
                _device_of(group),
                timedelta(seconds=transport.timeout),
                transport.prefetch,
                transport.lanes,
            ),
            rank=self.rank,
            last=last,
            loss_fn=loss_fn,
            complete=complete,
            activations=Activations(offload, self.stages.values()),
            border=transport.dtype,
            clock=clock_of(self.stages.values()),
        )
        self._holders = terms.holders
        self._programs: dict[bool, Program] = {}
        self._recorded: list[Recorded] = []
        self._failed = self._closed = False
        self._is_spent = False  # whether the connections have told of the end of the data, and are to be made anew
        # The program with most messages is compiled now, because connecting needs to know all peers.
        self._equipment.wire.connect(self._program(training=self._has_loss).arrivals)
        _connect(group if broadcast_loss else None, weight.group if weight and self.is_last else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the first stage, which takes the inputs."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage, which takes the target and computes the loss."""
        return self.schedule.stages - 1 in self.stages

    def step(self, *inputs: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any) -> Result:
        """Run the forward and backward of one batch, and accumulate the parameters' gradients.

        You may pass the complete batch on every rank. The first stage uses `inputs`, the last stage uses `target`, and
        every stage of a rank uses the `kwargs` of this rank.

        Args:
            *inputs: Nested tensors, [rows, ...], or `Microbatches`.
            target: Target of the loss: nested tensors, [rows, ...], or `Microbatches`.
            return_outputs: Whether to join and return the last stage's outputs. Default: False.
            **kwargs: Keyword arguments of the stages: nested tensors, [rows, ...], and values for all microbatches.

        Raises:
            ValueError, TypeError: The batch cannot be split; raised on every rank.
            RuntimeError: The step is called under torch.inference_mode().
            PipelineError: A stage has raised an error, or a rank is gone; raised on every rank.
        """
        self._check_training()
        return self._run(lambda: Batch(inputs, kwargs, target), training=True, keep_outputs=return_outputs)

    def _check_training(self) -> None:
        if not self._has_loss:
            raise ValueError(
                "step() needs a loss_fn, and the rank with the last stage has none; give Pipeline(..., loss_fn=...), "
                "or call evaluate()"
            )
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "step() under torch.inference_mode() would train nothing; call it outside, or call evaluate()"
            )

    def evaluate(self, *inputs: Any, target: Any = None, return_outputs: bool = True, **kwargs: Any) -> Result:
        """Run only the forward of one batch, without gradients. The modules' training mode stays unchanged.

        Args:
            *inputs: Nested tensors, [rows, ...], or `Microbatches`, for the first stage.
            target: Target of the loss; None: no loss is computed.
            return_outputs: Whether to join and return the last stage's outputs. Default: True.
            **kwargs: Keyword arguments of the stages: nested tensors, [rows, ...], and values for all microbatches.

        Raises:
            ValueError, TypeError: The batch cannot be split; raised on every rank.
            PipelineError: A stage has raised an error, or a rank is gone; raised on every rank.
        """
        return self._run(lambda: Batch(inputs, kwargs, target), training=False, keep_outputs=return_outputs)

    def forward_backward_step(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> tuple[Any, Any, Tensor | None]:
        """Run the next batch of an iterator, with the signature of ColossalAI's method.

        Args:
            data_iter: Iterator over pairs of inputs and target, or over `Batch`es with keyword arguments. Inputs in a
                tuple are several arguments. Any other item, such as a dict, is used as the inputs and as the target.
            forward_only: Whether to skip the backward. Default: False.
            return_loss: Whether to return the loss. Default: True.
            return_outputs: Whether to return the last stage's outputs. Default: False.

        Returns:
            Outputs, target and loss on the rank with the last stage; None on other ranks and for values not requested.

        Raises:
            StopIteration: The iterators of all ranks have ended.
            PipelineError: The iterators of some ranks have ended, or one has raised; on every rank. Otherwise as
                `step`.
        """
        target: Any = None

        def fetch() -> Batch:
            nonlocal target
            try:
                batch = next(data_iter)
            except StopIteration:
                raise DataEnded from None
            if isinstance(batch, Batch):
                target = batch.target
                return batch
            inputs, target = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, batch)
            return Batch(inputs if type(inputs) is tuple else (inputs,), {}, target)

        if not forward_only:
            self._check_training()
        loss, outputs = self._run(fetch, training=not forward_only, keep_outputs=return_outputs)
        return outputs, target if self.is_last else None, loss if return_loss else None

    def timeline(self) -> Timeline:
        """Return all ranks' actions in the last step with their times, in seconds from the first action's start."""
        meetings = []
        # One barrier is noisy by its own latency. The median of five differences is closer to the true offset of two
        # clocks.
        for _ in range(5):  # moments that are the same on all ranks, on clocks of their own
            dist.barrier(group=self.group)
            meetings.append(perf_counter())
        moments = [moment for action in self._recorded for moment in (action.start, action.end)]
        seconds = iter(self._equipment.clock.seconds(moments))
        mine = [Event(self.rank, action.action, next(seconds), next(seconds)) for action in self._recorded]
        by_rank: list[tuple[list[float], list[Event]]] = [(meetings, mine)] * dist.get_world_size(self.group)
        dist.all_gather_object(by_rank, (meetings, mine), group=self.group)
        first_meetings, _ = by_rank[0]
        events = []
        for theirs, recorded in by_rank:
            # All ranks leave a barrier at almost the same time, so the difference of their clocks there is the offset
            # between the clocks.
            ahead = median(one - other for one, other in zip(theirs, first_meetings, strict=True))
            events += [event._replace(start=event.start - ahead, end=event.end - ahead) for event in recorded]
        first = min((event.start for event in events), default=0.0)
        return Timeline([event._replace(start=event.start - first, end=event.end - first) for event in events])

    def reset(self, *, timeout: float = 600.0) -> None:
        """Make the pipeline usable after an error, with new connections.

        The caller must drop the failed step's gradients. A rank that still waits for this one raises an error.

        Args:
            timeout: Timeout for the other ranks to call `reset`, in seconds. After it, you may call `reset` again.

        Raises:
            PipelineError: Other ranks do not call `reset` within the timeout, or the pipeline is closed.
        """
        self._check_open()
        # If the meeting below fails, the pipeline has no connections, so only another reset() may use it.
        self._failed = True
        try:
            self._equipment.wire.reset(timedelta(seconds=timeout))
        except ConnectionError as error:
            raise PipelineError(str(error)) from error
        self._forget()
        self._failed = self._is_spent = False

    def close(self) -> None:
        """Release the connections, as at the end of a `with` block, without a wait for other ranks.

        A rank may call this method when its own step is over. If another rank then begins a step, it raises an error. A
        closed pipeline stays closed, and a second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._forget()
        self._equipment.wire.close("its pipeline was closed", is_idle=not self._failed)

    def _check_open(self) -> None:
        if self._closed:
            raise PipelineError("the pipeline is closed; make a new Pipeline(...)")

    def _forget(self) -> None:
        """Drop all microbatches that wait for a backward."""
        for stage in self._equipment.stages.values():
            stage.reset()
        self._equipment.activations.reset()

    def _run(self, fetch: Callable[[], Batch], *, training: bool, keep_outputs: bool) -> Result:
        self._check_open()
        if self._failed:
            raise PipelineError("the step before failed; call reset() on all ranks first")
        # All ranks have seen the end of the data and none has failed, so they all make new connections here without a
        # call of reset() by the user.
        if self._is_spent:
            self.reset(timeout=self._equipment.wire.timeout.total_seconds())
        program = self._program(training=training)
        run = StepExecution(equipment=self._equipment, program=program, training=training, keep_outputs=keep_outputs)
        try:
            self._equipment.wire.begin(program)
            return self._execute(run, fetch)
        except BaseException as error:
            self._fail(run, error)
            raise

    def _program(self, *, training: bool) -> Program:
        """Return this rank's program for a step or an evaluation; compile it on first use."""
        if training not in self._programs:
            self._programs[training] = compile_program(
                self.schedule,
                self.rank,
                forward_only=not training,
                holders=self._holders,
                broadcasts_loss=self._broadcasts_loss,
            )
        return self._programs[training]

    def _execute(self, run: StepExecution, fetch: Callable[[], Batch]) -> Result:
        """Run a step to its end; `_fail` reports any error here to the other ranks."""
        microbatches = self.schedule.microbatches
        # The batch is fetched after `wire.begin`, so that an iterator that ends or raises on this rank is reported to
        # the other ranks like any error in the step.
        inputs, kwargs, target = fetch()
        if run.training:
            # Gradients may be left over from earlier steps. The sum after this step must count them once, so only one
            # holder keeps them.
            for shared in self._shared:
                shared.begin_step()
        run.feed = make_feed(inputs, kwargs, target, microbatches, self._split)
        if self.is_last and self._equipment.loss_fn is not None:
            if self._weight is not None and run.training and not run.feed.targets:
                raise ValueError("weight counts what a target holds, but this step has none; give it target=")
            # Only the first output shows how many rows a microbatch has if neither inputs nor target are on this rank.
            # The run compares the outputs then, because equal weights were assumed.
            run.has_blind_shares = run.training and self._weight is None and not any(run.feed.rows)
            if self._weight is not None and not self._weight.normalize:
                run.shares = [float(self._weight.of(target)) for target in run.feed.targets]
            else:
                count, group = (None, None) if self._weight is None else (self._weight.of, self._weight.group)
                device = torch.device("cpu") if group is None else _device_of(group)
                run.shares = shares(run.feed, count, group, device)
        run.execute()
        if run.training:
            self._recorded = run.recorded
            run.doing = "summing the gradients of shared parameters"
            for number, shared in enumerate(self._shared):
                if self.rank in self._holders[number] and len(self._holders[number]) > 1:
                    shared.sum_gradients(partial(self._exchange, number))
        run.doing = "joining the outputs"
        outputs = merge([run.outputs[i] for i in range(len(run.outputs))]) if run.outputs else None
        run.doing = "summing the loss"
        loss = run.loss()
        if self._broadcasts_loss:
            run.doing = "sharing the loss"
            loss = self._broadcast(loss)
        run.doing = "waiting for the other ranks"
        # In training, the gradients make a lower rank wait for the higher ranks, so it is enough to wait for the status
        # of lower ranks. An evaluation has no such dependency. A broadcast loss has already confirmed the success of
        # all ranks.
        wait_for: WaitFor = "none" if self._broadcasts_loss else "lower" if run.training else "all"
        self._equipment.wire.end(run.program, wait_for)
        return Result(loss, outputs)

    def _fail(self, run: StepExecution, error: BaseException) -> None:
        """Report an error to all ranks, and raise the exception that all ranks raise."""
        self._failed = True
        if isinstance(error, (PeerFailed, ConnectionError)):
            clear_frames(error.__traceback__)  # which would keep the connections
        if isinstance(error, ConnectionError):
            error = self._equipment.wire.cause_of(error)
        # The failure is described before `run.forget()`, because the description names what the run was doing.
        failure = Failure.of(error, self.rank, run.doing)
        run.forget()
        self._forget()  # what waits for a backward: what the others still send may need its memory
        self._equipment.wire.fail(run.program, failure)
        self._compare_ends(failure, has_ended=isinstance(error, DataEnded))
        # The traceback of a failure on another rank would only show this rank's wait, so it is not chained.
        if isinstance(error, PeerFailed):
            raise failure.error() from None
        if isinstance(error, Exception):
            raise failure.error() from error

    def _compare_ends(self, failure: Failure, *, has_ended: bool) -> None:
        """Compare the ends of data over the ranks: it is not a failure if the data of all ranks has ended.

        After any other failure, this rank also reports, because other ranks may wait for it, but does not wait.

        Args:
            failure: Failure that this rank has seen.
            has_ended: Whether this rank's own data has ended.

        Raises:
            StopIteration: The data of all ranks has ended; the next step makes new connections.
            PipelineError: The data of only some ranks has ended.
        """
        ranks = range(dist.get_world_size(self.group))
        asks = failure.kind == DataEnded.__name__
        ended = self._equipment.wire.who_says_so(has_ended, waits=asks)
        if asks and ended == list(ranks):
            # The connections carry a failure message for the end of the data, so they cannot serve another step.
            self._failed, self._is_spent = False, len(ranks) > 1
            raise StopIteration from None
        if asks:
            others = [rank for rank in ranks if rank not in ended]
            raise PipelineError(
                f"the data of ranks {ended} of the pipeline has ended, that of ranks {others} has not; give all ranks "
                "as many batches. Call reset() on all ranks before the next step"
            ) from None

    def _exchange(
        self, number: int, cuts: Cuts | None, mine: list[Tensor]
    ) -> list[tuple[Cuts | None, Sequence[Tensor]]]:
        """Exchange the gradients of shared parameters with their other holders."""
        wire, message = self._equipment.wire, sum_message(number)
        # The cuts travel with the gradients only in the first step; afterwards all holders have compared them.
        tensors, signature = flatten(tuple(mine) if cuts is None else (cuts, *mine))
        others = [holder for holder in self._holders[number] if holder != self.rank]
        # All sends are begun before the first wait, so that two holders do not wait for each other.
        for holder in others:
            wire.give(message, holder, (signature, tensors))
        given: dict[int, tuple[Cuts | None, Sequence[Tensor]]] = {self.rank: (cuts, mine)}
        for holder in others:
            theirs, _ = across_border(*wire.take(message, holder))
            has_cuts = len(theirs) > 0 and isinstance(theirs[0], list)
            given[holder] = (theirs[0], theirs[1:]) if has_cuts else (None, theirs)
        return [given[holder] for holder in self._holders[number]]

    def _broadcast(self, loss: Tensor | None) -> Tensor | None:
        """Return the loss on every rank after all ranks have reached this point; None if no loss was computed.

        On a CPU, the message contains the loss. On GPUs, the message only confirms that all ranks succeeded, and hosts
        wait for it. The loss follows in a broadcast over the group, for which no host waits.
        """
        wire, root = self._equipment.wire, self.schedule.rank_of(self.schedule.stages - 1)
        others = [rank for rank in range(dist.get_world_size(self.group)) if rank != root]
        # The host must not wait for the loss on a GPU, but the dtype is known on the host, and the receivers need it to
        # allocate the broadcast's buffer.
        word: Any = loss.dtype if wire.are_apart and loss is not None else loss
        if self.rank == root:
            # The loss is sent only after every rank has reported success. A rank that receives it therefore knows that
            # the step succeeded everywhere.
            for rank in others:
                wire.take(WELL, rank)
            tensors, signature = flatten(word)
            for rank in others:
                wire.give(LOSS, rank, (signature, tensors))
        else:
            wire.give(WELL, root, (NOTHING, []))
            word, _ = across_border(*wire.take(LOSS, root))
        if not isinstance(word, torch.dtype):
            return loss if self.rank == root else word
        device = _device_of(self.group)
        value = torch.empty((), dtype=word, device=device) if loss is None else loss.to(device)
        dist.broadcast(value, group=self.group, group_src=root)
        return value


def _connect(*groups: dist.ProcessGroup | None) -> None:
    """Use each device communicator of a step once, because NCCL and others connect on first use."""
    for group in groups:
        device = torch.device("cpu") if group is None else _device_of(group)
        # gloo connects when the group is made, so only device communicators need a first use.
        if group is not None and backend_of(group, device.type) != "gloo":
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the group's sends: this rank's accelerator if the group has its backend, else the CPU."""
    return accelerator_of(group) or torch.device("cpu")
