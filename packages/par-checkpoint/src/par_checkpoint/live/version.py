"""A version of the weights that is complete in host memory, and the move of one to the processes of a generator."""

import logging
import math
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from par_groups import Box, Sharding

from .._apply import Into, apply_
from .._errors import CheckpointError, CorruptError, UnansweredError
from ..format.bytes import copy_elements_
from ..plan.claims import LocalTensor
from ..state.collect import Content, collect
from ..state.state import State
from ..transfer.memory import LocalState
from ..transfer.ranks import Ranks
from .holdings import Holdings
from .rendezvous import ABORT, COMMIT, Rendezvous, Transaction
from .source import MemorySource, MoveOptions

_logger = logging.getLogger(__name__)


def check_exchange(at: object, state: object) -> None:
    """Raise TypeError unless a rendezvous and a state are what they must be."""
    if not isinstance(at, Rendezvous):
        raise TypeError(f"at is a {type(at).__name__}; pass a par_checkpoint.Rendezvous")
    if not isinstance(state, State):
        raise TypeError(f"state is a {type(state).__name__}; pass a par_checkpoint.State")
    state.check_types()


def model_of(state: State) -> State:
    """Return the model of a state alone: other members do not move."""
    return State(model=state.model, layout=state.layout, names=state.names, convert=state.convert)


@dataclass(kw_only=True, eq=False)
class WeightCopy:
    """A copy of this rank's part of the weights in host memory.

    Args:
        tensors: Tensor of each part by its name in the exchange: all boxes of the rank, one after the other.
        layout: Sharding of each tensor.
        tied: Name of the stored tensor by name of a tensor that is tied to it.
        version: Numbers of the publisher and of the version of which the copy has all elements; None: of no version.
    """

    tensors: dict[str, torch.Tensor]
    layout: dict[str, Sharding]
    tied: dict[str, str]
    version: tuple[int, int] | None = None

    @classmethod
    def like(cls, content: Content, dtype: torch.dtype | None) -> "WeightCopy":
        """Return memory for the tensors of a rank.

        Args:
            content: Content of the rank.
            dtype: Dtype of floating-point tensors; None: each keeps its own.
        """
        tensors, layout = dict[str, torch.Tensor](), dict[str, Sharding]()
        for entry in content.entries:
            boxes, size = list[Box](), 0
            for box in entry.sharding.boxes:
                # The copy stores its boxes one after the other, and each of them is contiguous.
                stride = tuple(math.prod(box.size[dim + 1 :]) for dim in range(len(box.size)))
                boxes.append(replace(box, offset=size, stride=stride))
                size += box.numel
            # float8 values keep their dtype, because they count only times their scales.
            is_cast = dtype is not None and entry.dtype.is_floating_point and entry.dtype.itemsize > 1
            shape = boxes[0].size if len(boxes) == 1 else (size,)
            tensors[entry.name] = torch.empty(shape, dtype=dtype if is_cast else entry.dtype, device="cpu")
            layout[entry.name] = replace(entry.sharding, boxes=tuple(boxes))
        return cls(tensors=tensors, layout=layout, tied=dict(content.tied))

    def copy_from_(self, entries: Iterable[LocalTensor]) -> None:
        """Fill the copy with the values of a rank, which are cast."""
        for entry in entries:
            for mine, box in zip(self.layout[entry.name].boxes, entry.sharding.boxes, strict=True):
                copy_elements_(mine.of(self.tensors[entry.name]), box.of(entry.local))

    def copy_to_(self, entries: Sequence[LocalTensor]) -> None:
        """Copy the values to the tensors of a rank.

        Raises:
            CheckpointError: The rank has other tensors than before; nothing has changed.
        """
        boxes = {entry.name: [(box.start, box.size) for box in entry.sharding.boxes] for entry in entries}
        if boxes != {name: [(box.start, box.size) for box in each.boxes] for name, each in self.layout.items()}:
            raise CheckpointError(
                "the model's tensors have other names, shapes or shards than when the Receiver was made; make a new one"
            )
        for entry in entries:
            for mine, box in zip(self.layout[entry.name].boxes, entry.sharding.boxes, strict=True):
                copy_elements_(box.of(entry.local), mine.of(self.tensors[entry.name]))

    @property
    def state(self) -> State:
        """The copy as an argument of a move."""
        return State(model=self.tensors, layout=self.layout)

    def is_like(self, other: "WeightCopy") -> bool:
        """Return whether two copies have tensors of equal dtypes, sharded identically."""
        dtypes, others = ({name: each.dtype for name, each in copy.tensors.items()} for copy in (self, other))
        return dtypes == others and self.layout == other.layout

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class MismatchError(CheckpointError):
    """A generator asks for other tensors than the trainer has."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One attempt to move a version into the memory of a generator's processes.

    Args:
        at: Rendezvous of the processes.
        rank: Number of this process: the trainer's ranks come first.
        size: Number of all processes.
        budget: Bytes of the buffers for messages; the least of all processes counts.
        timeout: Seconds to wait for a process that does not answer.
    """

    at: Rendezvous
    rank: int
    size: int
    budget: int
    timeout: float

    def run_(
        self,
        transaction: Transaction,
        *,
        source: WeightCopy | None = None,
        target: WeightCopy | None = None,
        bases: Sequence[WeightCopy] = (),
    ) -> int | None:
        """Move the version. Collective over all processes.

        Args:
            transaction: This attempt.
            source: Weights of this process; None in a generator.
            target: Weights that it fills; None in a trainer. If they have a version, only changed values travel.
            bases: Versions that this process still has; a target of one of them receives changed values only.

        Returns:
            Bytes of tensors that this process has received, or None if the attempt was aborted.

        Raises:
            MismatchError: Source and target do not have the same tensors; on every process.
        """
        begun: list[MemorySource] = []
        # The client is not shared: gloo may block it while two processes connect.
        store = Transaction(self.at.open(), transaction.publisher, transaction.number).store
        ranks = Ranks.in_store(store, "an update of weights", self.rank, self.size, self.timeout)
        try:
            transaction.gather(self.size, self.timeout)
            ranks.connect()
            self._move_(ranks, begun, source, target, bases)
        except Exception as error:
            # A process ends the move without an error only after all have compared the digests of complete copies. So
            # if another process has committed, this copy is complete, too.
            decision = transaction.decide(ABORT)
            # Other values than those that left may arrive again and again, while nothing else shows it.
            level = logging.WARNING if isinstance(error, CorruptError) else logging.INFO
            _logger.log(level, "update %d ended with %s: %s", transaction.number, decision, error)
            is_mismatch = isinstance(error, ValueError | TypeError | CheckpointError)
            if is_mismatch and not isinstance(error, UnansweredError) and not (begun and begun[0].has_begun):
                raise MismatchError(f"the trainer's weights do not fit the generator's: {error}") from None
            # What refers to messages must be gone before gloo closes its connections, or it would not close them.
            received = begun[0].received if begun else 0
            begun.clear()
            last: BaseException | None = error
            while last is not None:
                traceback.clear_frames(last.__traceback__)
                last = last.__cause__ or last.__context__
        else:
            decision = transaction.decide(COMMIT)
            received = begun[0].received
        finally:
            ranks.disconnect()
        return received if decision == COMMIT else None

    def _move_(
        self,
        ranks: Ranks,
        begun: list[MemorySource],
        source: WeightCopy | None,
        target: WeightCopy | None,
        bases: Sequence[WeightCopy],
    ) -> None:
        """Move the values; `begun` receives the source once it exists."""
        held = State() if source is None else source.state
        filled = State() if target is None else target.state

        def look() -> tuple[Holdings, list[int]]:
            content = collect(held)
            mine = Holdings.of(content if source is None else replace(content, tied=source.tied), held)
            return mine, mine.words(ranks.rank)

        mine, sums = ranks.tell(look, Holdings.COUNT)
        tensors, outline = mine.united(sums, ranks, lambda _, make: make(), ["model"])
        # Each process of a generator tells its own base: an attempt that was aborted may have reached some of them.
        reports = ranks.distinct((None if target is None else target.version, self.budget))
        # Both ends cut tensors into messages by the budget, and those of trainer and generator may differ.
        options = MoveOptions(budget=min(budget for _, (_, budget) in reports), release=False, verify=True)
        memory = MemorySource(ranks, mine.content, tensors, outline, filled, options)
        begun.append(memory)
        for takers, (version, _) in reports:
            if version is None:
                continue
            memory.based |= set(takers)
            for base in bases:
                if base.version == version and source is not None and base.is_like(source):
                    state = LocalState.of(collect(base.state).entries, memory.tensors)
                    memory.bases.update(dict.fromkeys(takers, state))
        if target is not None:
            # Until the move ends, the memory holds elements of two versions, so it can be no base.
            target.version = None
        dtypes = () if target is None else {each.dtype for each in target.tensors.values()}
        floating = tuple(dtype for dtype in dtypes if dtype.is_floating_point)
        apply_(Into(state=filled, strict=True, dtype=floating or None, device=None), memory, ranks)
