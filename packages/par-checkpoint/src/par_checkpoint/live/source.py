"""The memory of ranks as the source of state: the elements of each rank, and their transfer into the targets."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain

import torch
from torch.autograd.graph import increment_version

from par_groups import GlobalTensor
from par_groups.sharding.held import by_shape

from .._errors import UNDEFINED, CheckpointError, CorruptError
from ..format.bytes import copy_elements_
from ..plan.claims import name_of, section_of
from ..state.collect import Content
from ..state.model import device_for
from ..state.overlap import MemoryRegion, check_separate, region_of_storage, regions_of
from ..state.state import State
from ..state.targets import FillTarget, OptimizerTargets, Targets, set_scalars_
from ..storage.outline import Outline
from ..transfer.errors import attempt
from ..transfer.exchange import PieceExchange
from ..transfer.memory import LocalState, padded, unpacked
from ..transfer.ranks import Ranks
from ..transfer.sessions import Session
from .delta import changed_mask, decode_, encode_
from .digest import MODULUS, digest_of_box
from .requests import count_of_words, exchange_counts, exchange_requests, takers_of, words_of_givers
from .wanted import MemoryPiece, PieceRequests, Wanted, halved, pieces_of

_Pieces = dict[int, list[MemoryPiece]]

_ALONE = 1 << 20  # bytes of a piece above which a copy costs more than a message, which costs gloo about 0.1 ms
_BUFFERS = 3  # buffers each way: one is packed while two travel
# Maximum bytes of a message. Ranks on two cores took 1.2 times as much CPU time with 2 MB, and the same with 16 MB.
_MESSAGE = 1 << 23
_DIGESTED = 1 << 18  # elements of a digest at a time, which needs several integers for each


@dataclass(frozen=True, kw_only=True)
class MoveOptions:
    """How state moves.

    Args:
        budget: Bytes of the buffers for messages.
        release: Whether each tensor of the source is freed once its last piece has left.
        verify: Whether the values of each tensor are compared by a digest after they have moved.
    """

    budget: int
    release: bool
    verify: bool


@dataclass(eq=False)
class MemorySource:
    """State in the memory of ranks; see `par_checkpoint._apply.Source`.

    Args:
        ranks: The ranks.
        content: Content of this rank.
        tensors: Tensors of all ranks, with their boxes.
        outline: Everything but the data, the same on every rank.
        target: Objects of this rank that are filled.
        options: Options of the move.
        session: Session that keeps the buffers for the next move; None: they are freed after this one.

    Attributes:
        based: Ranks that have a base: an earlier version of their targets, so that changed values are enough.
        bases: The same version as this rank has it, by rank that has a base; without it, all values are sent.
        received: Bytes that this rank has received from others.
        sent: Bytes that it has sent.
        local: Bytes that it has copied within its memory.
        has_begun: Whether all checks have passed and tensors may have changed.
    """

    ranks: Ranks
    content: Content
    tensors: Sequence[GlobalTensor]
    outline: Outline
    target: State
    options: MoveOptions
    session: Session | None = None
    title: str = "the source"
    kind: str = "source"
    based: Set[int] = frozenset()
    bases: dict[int, LocalState] = field(default_factory=dict)
    received: int = 0
    sent: int = 0
    local: int = 0
    has_begun: bool = False
    _new: int = 0  # number of targets on all ranks that need memory
    _requests: dict[str, PieceRequests] = field(default_factory=dict)  # by section, as the next one
    _takers: dict[str, list[int]] = field(default_factory=dict)  # ranks that request pieces from this rank
    _given: Counter[int] = field(default_factory=Counter)  # digests of given elements, by tensor
    _taken: Counter[int] = field(default_factory=Counter)

    def prepare(self) -> None:
        """Check that the source has all requested tensors, and wait for kernels that write to them."""
        manifest = self.outline.manifest
        for name in ("optimizer", "scheduler"):
            if getattr(self.target, name) is not None and getattr(manifest, name) is None:
                raise ValueError(
                    f"target has {name}=..., but no rank's source has one; pass it in the source, or remove it here"
                )
        self._held.wait_for_streams()

    def check(self, targets: Sequence[Targets], same: set[tuple[str, str]]) -> None:
        """Compute the pieces that this rank requests from each rank, and check that they exist. Collective.

        Raises:
            ValueError: No rank holds some elements, a target shares memory with the source or with another target, or a
                target ties two tensors of the source; on every rank.
        """
        if same:
            one, other = min(same)
            raise ValueError(
                f"target has one tensor for {one!r} and {other!r}, which are two in the source; tie them there, too"
            )
        ranks, hosts = self.ranks, self.ranks.hosts()

        def plan() -> tuple[None, list[int]]:
            check_separate(chain(self._regions(), *(target.regions() for each in targets for target in each.pending)))
            for each in targets:
                wanted = [wanted for wanted, _ in self._wanted(each)]
                self._requests[_section_of(each)] = PieceRequests(self.tensors, wanted, ranks.rank, hosts)
            # A giver learns from the same sum which ranks will send it a request.
            masks = (words_of_givers(self._requests[section].givers, ranks) for section in self.outline.directories)
            new = sum(target.tensor.is_meta for each in targets for target in each.pending)
            return None, [*chain.from_iterable(masks), new]

        size = count_of_words(ranks)
        _, (*sums, self._new) = ranks.tell(plan, size * len(self.outline.directories) + 1)
        for number, section in enumerate(self.outline.directories):
            self._takers[section] = takers_of(sums[number * size : (number + 1) * size], ranks)

    def fill_(self, targets: Targets) -> None:
        """Move the pieces of the targets. Collective.

        Raises:
            CheckpointError: A rank is gone or has failed, or digests differ. The targets are then undefined.
        """
        self.has_begun = True
        ranks, section = self.ranks, _section_of(targets)
        requests = self._requests.pop(section)
        rows_by_giver = {giver: requests.rows_to(giver) for giver in requests.givers}
        incoming = {giver: pieces_of(rows, self.tensors, self._order) for giver, rows in rows_by_giver.items()}
        asked = exchange_requests(ranks, rows_by_giver, self._takers.pop(section))
        outgoing = {taker: pieces_of(rows, self.tensors, self._order) for taker, rows in asked.items()}
        requests.local.sort(key=lambda piece: piece.tensor)
        for first, stop in self._rounds(section):
            # Targets on the meta device get memory round by round, while the source frees memory.
            inside = [(wanted, target) for wanted, target in self._wanted(targets) if first <= wanted.tensor < stop]
            states = partial(self._local_states, inside)
            # Only an allocation can fail, and all ranks must know of it before a rank sends.
            local = ranks.agree(states) if self._new else states()
            leaving = {taker: self._between(pieces, first, stop) for taker, pieces in outgoing.items()}
            coming = {giver: self._between(pieces, first, stop) for giver, pieces in incoming.items()}
            if self.based:
                self._count_changes_(leaving, coming)
            here = self._between(requests.local, first, stop)
            move = partial(self._move_, local, outgoing=leaving, incoming=coming, here=here)
            _, error = attempt(move)
            ranks.raise_first(None if error is None else _undefined(error))
            if self.options.release:
                self._release_(first, stop, section)
        if self.options.verify:
            self._compare_digests()
        if isinstance(targets, OptimizerTargets):
            scalars = targets.scalars

            def set_() -> None:
                differing = list(set_scalars_(scalars))
                if differing:
                    raise CheckpointError(f"{'; '.join(differing)}{UNDEFINED}")

            ranks.agree(set_)

    def _move_(
        self,
        local: Mapping[int, LocalState],
        *,
        outgoing: _Pieces,
        incoming: _Pieces,
        here: Sequence[MemoryPiece],
    ) -> None:
        """Move the pieces of one round.

        Args:
            local: Tensors to fill, by copy.
            outgoing: Pieces to send, by rank.
            incoming: Pieces to receive, by rank.
            here: Pieces that stay on this rank.
        """
        held, failed = self._held, list[Exception]()

        # A rank that fails here, such as for lack of device memory, still sends and receives all messages. The other
        # ranks would otherwise wait for them until the timeout; so all ranks raise its error after the round.
        def fill(to: int, pieces: Sequence[MemoryPiece], buffer: torch.Tensor) -> torch.Tensor:
            self.sent += sum(piece.bytes for piece in pieces)
            try:
                direct = held.place(pieces) if self._is_plain(pieces[0]) else None
                for piece, packed in zip(pieces, _packed(pieces, buffer), strict=True):
                    if direct is None:
                        self._pack_(packed, piece, to)
                    self._note(self._given, piece, held)
            except Exception as error:
                failed.append(error)
                direct = None
            return buffer if direct is None else direct

        def place(pieces: Sequence[MemoryPiece]) -> torch.Tensor | None:
            self.received += sum(piece.bytes for piece in pieces)
            return local[pieces[0].copy].place(pieces) if self._is_plain(pieces[0]) else None

        def take(pieces: Sequence[MemoryPiece], buffer: torch.Tensor) -> None:
            try:
                for piece, packed in zip(pieces, _packed(pieces, buffer), strict=True):
                    into = local[piece.copy].view(piece)
                    if piece.is_full or piece.changed is None:
                        copy_elements_(into, packed)
                    else:
                        decode_(into, packed, piece.dtype, piece.changed)
            except Exception as error:
                failed.append(error)

        for piece in here:
            copy_elements_(local[piece.copy].view(piece), held.view(piece))
            self.local += piece.bytes
            self._note(self._given, piece, held)
        # No message travels for pieces in which nothing changed.
        leaving, coming = (
            {peer: [piece for piece in pieces if piece.bytes] for peer, pieces in pairs.items()}
            for pairs in (outgoing, incoming)
        )
        self._exchange.run(leaving, coming, fill=fill, take=take, place=place)
        if failed:
            raise failed[0]
        # Elements that did not change are part of the digests, so that another base than the giver's is seen.
        for piece in chain.from_iterable(outgoing.values()):
            if not piece.bytes:
                self._note(self._given, piece, held)
        for piece in chain(here, *incoming.values()):
            self._note(self._taken, piece, local[piece.copy])

    def _pack_(self, packed: torch.Tensor, piece: MemoryPiece, taker: int) -> None:
        """Copy a piece to a message."""
        values = self._held.view(piece)
        if piece.is_full:
            copy_elements_(packed, values)
        else:
            encode_(packed, values.to(piece.dtype), self._changes(piece, taker))

    def _count_changes_(self, outgoing: _Pieces, incoming: _Pieces) -> None:
        """Set how many elements of each piece changed, which givers count and send. Collective."""
        counts = {
            taker: [int(self._changes(piece, taker).sum()) for piece in pieces]
            for taker, pieces in outgoing.items()
            if taker in self.based
        }
        sizes = {giver: len(pieces) for giver, pieces in incoming.items() if self.ranks.rank in self.based}
        received = exchange_counts(self.ranks, counts, sizes)
        for pairs, numbers in ((outgoing, counts), (incoming, received)):
            for peer, changed in numbers.items():
                pairs[peer] = [piece._replace(changed=k) for piece, k in zip(pairs[peer], changed, strict=True)]

    def _changes(self, piece: MemoryPiece, taker: int) -> torch.Tensor:
        """Return which elements of a piece differ from the taker's base; all of them if this rank lacks the base."""
        base = self.bases.get(taker)
        if base is None or piece.dtype.itemsize > torch.int64.itemsize:
            return torch.ones(piece.numel, dtype=torch.bool, device="cpu")
        # Both are cast as they travel: many small updates vanish in a narrower dtype.
        return changed_mask(*(state.view(piece).to(piece.dtype) for state in (base, self._held)))

    @cached_property
    def _held(self) -> LocalState:
        """Tensors of the source on this rank."""
        return LocalState.of(self.content.entries, self.tensors)

    def _regions(self) -> Iterator[MemoryRegion]:
        """Yield the memory of the source on this rank, which must not change before it has left."""
        freed: dict[int, MemoryRegion] = {}
        for entry in self.content.entries:
            if self.options.release:  # all of its storage is freed
                region = region_of_storage(entry.name, entry.local)
                freed.setdefault(region.begin, region)
            else:
                yield from regions_of(entry.name, entry.sharding, entry.local, is_source=True)
        yield from freed.values()

    @cached_property
    def _exchange(self) -> PieceExchange[MemoryPiece]:
        """Buffers of all rounds and sections, and of the next move: new pages would cost as much as a copy."""
        limit = self._message

        def make() -> PieceExchange[MemoryPiece]:
            return PieceExchange(self.ranks, _packed_size, limit=limit, alone=min(_ALONE, limit), buffers=_BUFFERS)

        return make() if self.session is None else self.session.exchange(limit, make)

    @cached_property
    def _order(self) -> list[int]:
        """Numbers of the tensors in the order to which requests refer."""
        return by_shape((tensor.key, tensor.dtype, tensor.shape) for tensor in self.tensors)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Number of each tensor, by key."""
        return {tensor.key: number for number, tensor in enumerate(self.tensors)}

    @cached_property
    def _users(self) -> Counter[int]:
        """Number of entries whose pieces have not left, by address of the storage that they share."""
        return Counter(entry.local.untyped_storage().data_ptr() for entry in self.content.entries)

    def _wanted(self, targets: Targets) -> Iterator[tuple[Wanted, FillTarget]]:
        """Yield what this rank takes, with the target of each tensor."""
        copies = Counter[str]()
        for target in targets.pending:
            number, copy = self._numbers[target.key], copies[target.key]
            # One tensor of the source may fill several tensors of the target, such as those that are tied in the
            # source only.
            copies[target.key] += 1
            yield Wanted(number, target.sharding, target.tensor.dtype, copy), target

    def _rounds(self, section: str) -> Iterator[tuple[int, int]]:
        """Yield consecutive ranges of tensors that move one after the other, the same on every rank."""
        if not self.options.release:
            yield 0, len(self.tensors)
            return
        # In a round a rank may hold a tensor both in the source and in the target, about a budget of bytes in all.
        first = size = 0
        for number, tensor in enumerate(self.tensors):
            # Tensors of the other section are in the numbering, but do not move in these rounds.
            own = tensor.bytes if section_of(tensor.key) == section else 0
            if size + own > self.options.budget * self.ranks.size and number > first:
                yield first, number
                first, size = number, 0
            size += own
        yield first, len(self.tensors)

    def _between(self, pieces: Sequence[MemoryPiece], first: int, stop: int) -> list[MemoryPiece]:
        """Return the pieces of tensors `first` to `stop` - 1, in parts that fit into a buffer."""
        begin, end = (bisect_left(pieces, number, key=lambda piece: piece.tensor) for number in (first, stop))
        return [part for piece in pieces[begin:end] for part in halved(piece, self._message // piece.dtype.itemsize)]

    @property
    def _message(self) -> int:
        """Maximum bytes of a message: the budget holds the buffers of both directions."""
        return min(self.options.budget // (2 * _BUFFERS), _MESSAGE)

    def _local_states(self, targets: Iterable[tuple[Wanted, FillTarget]]) -> dict[int, LocalState]:
        """Return the tensors to fill, by copy. Tensors on the meta device get memory."""
        device = device_for(None, self.target.model)
        by_copy: dict[int, list[FillTarget]] = {}
        for wanted, target in targets:
            by_copy.setdefault(wanted.copy, []).append(target)
        entries = {copy: [each.entry(device) for each in some] for copy, some in by_copy.items()}
        # Bytes arrive unseen by autograd, and by a save that copies in the background.
        locals_ = (entry.local for some in entries.values() for entry in some)
        increment_version([each for each in locals_ if not each.is_inference()])
        return {copy: LocalState.of(some, self.tensors) for copy, some in entries.items()}

    def _is_plain(self, piece: MemoryPiece) -> bool:
        """Return whether all elements of a piece travel in the source's dtype."""
        return piece.is_full and piece.dtype == self.tensors[piece.tensor].dtype

    def _release_(self, first: int, stop: int, section: str) -> None:
        """Free the tensors of the source that have left, once nothing else is in their storage."""
        for entry in self.content.entries:
            if section_of(entry.key) == section and first <= self._numbers[entry.key] < stop:
                storage = entry.local.untyped_storage()
                address = storage.data_ptr()
                self._users[address] -= 1
                if not self._users[address] and storage.resizable():
                    storage.resize_(0)

    def _note(self, sums: Counter[int], piece: MemoryPiece, where: LocalState) -> None:
        """Add the digest of a piece, in the dtype in which it travels, if digests are compared."""
        if self.options.verify:
            shape = self.tensors[piece.tensor].shape
            for part in halved(piece, _DIGESTED):
                sums[piece.tensor] += digest_of_box(where.view(part).to(piece.dtype), part.start, shape)

    def _compare_digests(self) -> None:
        """Raise CorruptError on every rank unless the given elements of each tensor are the taken ones. Collective."""
        count = len(self.tensors)
        both = [each[number] % MODULUS for each in (self._given, self._taken) for number in range(count)]
        sums = self.ranks.total(both)
        wrong = [n for n in range(count) if (sums[n] - sums[count + n]) % MODULUS]
        if wrong:
            raise CorruptError(
                f"{name_of(self.tensors[wrong[0]].key)!r} and {len(wrong) - 1} more arrived with other values than "
                f"those that left: memory or a link is faulty, or a program has written to the source{UNDEFINED}"
            )


def _section_of(targets: Targets) -> str:
    """Return the section that some targets belong to."""
    return "optimizer" if isinstance(targets, OptimizerTargets) else "model"


def _undefined(error: BaseException) -> BaseException:
    """Return an error with the note that some tensors may be filled and others not."""
    return CheckpointError(f"{error}{UNDEFINED}") if isinstance(error, Exception) else error


def _packed(pieces: Sequence[MemoryPiece], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the pieces as views of a buffer that stores them one after the other; encoded ones as bytes."""
    kinds = ((piece.dtype, piece.size) if piece.is_full else (torch.uint8, (piece.bytes,)) for piece in pieces)
    return unpacked(kinds, buffer)


def _packed_size(pieces: Sequence[MemoryPiece]) -> int:
    """Return the bytes of a message; the last piece is not padded, so that one alone is as long as its memory."""
    return sum(padded(piece.bytes) for piece in pieces[:-1]) + pieces[-1].bytes
