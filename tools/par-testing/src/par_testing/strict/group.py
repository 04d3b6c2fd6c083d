"""The process group that torch calls: every operation is described, handed to the player, and refused if NCCL would."""

from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork
from torch._subclasses.fake_tensor import FakeTensor

from par_groups import attributes

from ..counting.counting import report
from .batch import BatchedMessage, MessageBatch
from .buffers import Buffers
from .compute import REDUCTIONS, exchanged, part_of, reduced
from .devices import DeviceOfRank
from .operation import Operation, Part
from .payloads import Share, by_tensor, bytes_of, cut, messages_to, tensor_of
from .player import Compute, Player, StrictError, StrictWork
from .sites import batch_around, sites
from .step import check_first_use, check_objects

_ProcessGroup: Any = dist.ProcessGroup  # whose stubs have two signatures for each method, and this one's takes either


class StrictGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose ranks are compared, one operation after the other.

    Args:
        members: The ranks of the world that it joins, in its order.
        name: Its name, which no other group has.
        player: This rank's line to the referee.

    Raises:
        StrictError: A rank without a process is like one that is not in the group.
    """

    def __init__(self, members: Sequence[int], name: str, player: Player) -> None:
        rank = members.index(player.rank)
        super().__init__(rank, len(members))
        self.members, self._name, self._player = tuple(members), name, player
        alike = player.strict.alike
        self._like = tuple(member - member % alike for member in members)  # for each member, whose process it has
        for member, process in zip(self.members, self._like, strict=True):
            if process not in self.members:
                raise StrictError(
                    f"rank {member} does what rank {process} does (Strict(alike={alike})), which is not in a group of "
                    f"{list(members)}; let both be in it, or give ranks another order"
                )
        self._batch: MessageBatch | None = None
        self._connected: set[tuple[int, ...]] = set()  # what was used: () for all members, or the pair of a message
        # What torch asks a backend for, such as the group's name, must come from one; this one refuses to communicate,
        # so what is not overridden here fails.
        backend_class: Any = FakeProcessGroup
        options = backend_class.Options()
        options.error_on_collective = True
        backend = backend_class._create_internal(rank, len(members), options)
        for kind in device_types(player.device):
            self._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, backend)

    # What torch calls, by its newer names.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name that torch knows the backend by."""
        return "strict"

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> dist.Work:
        """Every tensor is replaced by the ranks' numbers combined."""
        tensors = _listed(tensors)
        reduction = self._reduction(named.get("op", opts), tensors)

        def compute(shares: Sequence[Share]) -> list[bytes]:
            return self._combined(by_tensor(shares, tensors), reduction)

        return self._issue("all_reduce", tensors, tensors, compute, reduction=reduction)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """As `allreduce`."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> dist.Work:
        """Every tensor is replaced by that of the root."""
        tensors, root = _listed(tensors), self._root(named.get("root", opts))
        mine = root == self.rank()
        return self._issue(
            "broadcast",
            tensors if mine else [],
            [] if mine else tensors,
            lambda shares: [] if mine else cut(shares[root][1], tensors),
            root=root,
            items=tensors,
        )

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None, *rest: Any) -> dist.Work:
        """All members' tensors, one after the other."""
        return self.all_gather_single_coalesced([output], [given])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """All members' tensors, one after the other, for each of several."""
        inputs, outputs = _listed(inputs), _listed(outputs)
        for output, own in zip(outputs, inputs, strict=True):
            self._check_size("all_gather", output, own.numel() * self.size())

        def compute(shares: Sequence[Share]) -> list[bytes]:
            return [bytes_of(torch.cat(list(each))) for each in by_tensor(shares, inputs)]

        return self._issue("all_gather", inputs, outputs, compute)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any, **named: Any) -> dist.Work:
        """All members' tensors, each in a tensor of its own."""
        outputs, inputs = _lists(outputs), _listed(inputs)
        flat = [output for one in outputs for output in one]
        for own, one in zip(inputs, outputs, strict=True):
            for output in one:
                self._check_size("all_gather", output, own.numel())

        def compute(shares: Sequence[Share]) -> list[bytes]:
            return [bytes_of(share) for each in by_tensor(shares, inputs) for share in each]

        return self._issue("all_gather", inputs, flat, compute)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> dist.Work:
        """As `allgather`, for several tensors; the lists go by member."""
        return self.allgather([list(each) for each in zip(*output_lists, strict=True)], input_list)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None, *rest: Any) -> dist.Work:
        """This member's part of the ranks' numbers combined."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """This member's part of the ranks' numbers combined, for each of several tensors."""
        inputs, outputs = _listed(inputs), _listed(outputs)
        reduction = self._reduction(opts, inputs)
        for output, own in zip(outputs, inputs, strict=True):
            self._check_size("reduce_scatter", own, output.numel() * self.size())

        def compute(shares: Sequence[Share]) -> list[bytes]:
            parts = ([part_of(share, self.rank(), self.size()) for share in each] for each in by_tensor(shares, inputs))
            return self._combined(parts, reduction)

        return self._issue("reduce_scatter", inputs, outputs, compute, reduction=reduction)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any, **named: Any) -> dist.Work:
        """As `reduce_scatter_single`, for parts that are tensors of their own."""
        outputs, inputs = _listed(outputs), _lists(inputs)
        flat = [part for one in inputs for part in one]
        reduction = self._reduction(named.get("op", opts), flat)
        for output, one in zip(outputs, inputs, strict=True):
            self._check_size("reduce_scatter", one[self.rank()], output.numel())

        def compute(shares: Sequence[Share]) -> list[bytes]:
            tensors = by_tensor(shares, flat)
            mine = [tensors[each * self.size() + self.rank()] for each in range(len(outputs))]
            return self._combined(mine, reduction)

        return self._issue("reduce_scatter", flat, outputs, compute, reduction=reduction)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *rest: Any,
    ) -> dist.Work:
        """Every member sends a part to each."""
        return self._exchange([given], [output], self._splits(given, input_splits), self._splits(output, output_splits))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """As `all_to_all_single`, for parts that are tensors of their own."""
        outputs, inputs = _listed(outputs), _listed(inputs)
        sends, expects = tuple(each.numel() for each in inputs), tuple(each.numel() for each in outputs)
        return self._exchange(inputs, outputs, sends, expects)

    def _exchange(
        self, inputs: list[Tensor], outputs: list[Tensor], sends: tuple[int, ...], expects: tuple[int, ...]
    ) -> dist.Work:
        """Sends a part to each member, whether the parts lie in one tensor or each in one of its own.

        Args:
            inputs: What is sent, one part after the other.
            outputs: Where the parts from all members go, one after the other.
            sends: For each member, how many elements it is sent.
            expects: For each member, how many elements it is to send.
        """

        def compute(shares: Sequence[Share]) -> list[bytes]:
            tensors = [tensor_of(payload, inputs[0].dtype) for _, payload in shares]
            got = exchanged(tensors, [entry.operation.sends for entry, _ in shares], self.rank())
            parts = [got] if len(outputs) == 1 else got.split([each.numel() for each in outputs])
            return [bytes_of(part) for part in parts]

        return self._issue("all_to_all", inputs, outputs, compute, sends=sends, expects=expects)

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> dist.Work:
        """The root's tensor is replaced by the ranks' numbers combined."""
        tensors, root = _listed(tensors), self._root(named.get("root", opts))
        reduction = self._reduction(named.get("op", rest[0] if rest else opts), tensors)
        mine = root == self.rank()

        def compute(shares: Sequence[Share]) -> list[bytes]:
            if not mine:
                return []
            return self._combined(by_tensor(shares, tensors), reduction)

        return self._issue("reduce", tensors, tensors if mine else [], compute, reduction=reduction, root=root)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any, **named: Any) -> dist.Work:
        """The root gets all members' tensors."""
        inputs, root = _listed(inputs), self._root(named.get("root", opts))
        mine = [output for one in _lists(outputs) for output in one] if root == self.rank() else []

        def compute(shares: Sequence[Share]) -> list[bytes]:
            return [payload for _, payload in shares] if mine else []

        return self._issue("gather", inputs, mine, compute, root=root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any, **named: Any) -> dist.Work:
        """Every member gets its part of what the root has."""
        outputs, root = _listed(outputs), self._root(named.get("root", opts))
        own = [part for one in _lists(inputs) for part in one] if root == self.rank() else []

        def compute(shares: Sequence[Share]) -> list[bytes]:
            return cut(shares[root][1], outputs * self.size())[self.rank() :: self.size()]

        return self._issue("scatter", own, outputs, compute, root=root, items=outputs)

    def barrier(self, opts: Any = None, *rest: Any, **named: Any) -> dist.Work:
        """Nothing but that all have come."""
        return self._issue("barrier", [], [], lambda _: [])

    def monitored_barrier(self, *rest: Any, **named: Any) -> None:
        """As `barrier`, waited for."""
        self.barrier().wait()

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """A message to another member."""
        return self._message("send", _listed(tensors), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """A message from another member."""
        return self._message("recv", _listed(tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Refused: NCCL does not know who sends first.

        Raises:
            StrictError: Always.
        """
        raise StrictError("recv from any rank: NCCL cannot; name the rank that sends")

    # The older names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def abort(self) -> None:
        """Ends all works of this rank with an error."""
        self._player.report(f"rank {self._player.rank} aborted {self._title}")

    # What they have in common.

    @property
    def _present(self) -> tuple[int, ...]:
        """The members that have a process, in the order of the group."""
        return tuple(dict.fromkeys(self._like))

    def _root(self, asked: Any) -> int:
        """The member that sends or collects, by its place in the group; of those alike, the one with a process."""
        return self.members.index(self._like[int(getattr(asked, "rootRank", asked))])

    @property
    def _title(self) -> str:
        """How errors name the communicator: the name torch gave it, what the program says it is, and its ranks."""
        description = self.group_desc
        named = "" if description in ("", "undefined", "default_pg") else f" {description}"
        return f"{self._name}{named}{list(self.members)}"

    def _issue(
        self,
        name: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        compute: Compute,
        *,
        root: int | None = None,
        items: list[Tensor] | None = None,
        **details: Any,
    ) -> dist.Work:
        if any(isinstance(each, FakeTensor) for each in (*inputs, *outputs)):
            return FakeWork()  # fakes have shapes but no numbers to send
        check_objects(self._player.strict.objects)
        self._connect(())
        described = inputs if items is None else items
        for tensor in (*inputs, *outputs):
            self._check(name, tensor)
        operation = Operation(
            name=name,
            items=tuple((each.numel(), _type(each)) for each in described),
            root=None if root is None else self.members[root],
            label=next(filter(None, map(attributes.LABEL.of, described)), ""),
            sites=sites(),
            **details,
        )
        self._report(name, inputs, outputs)

        def compute_for_all(shares: Sequence[Share]) -> list[bytes]:
            of_process = {share[0].rank: share for share in shares}
            return compute([of_process[rank] for rank in self._like])

        return self._start(self._title, self._present, operation, inputs, outputs, compute_for_all, joined=self.members)

    def _message(self, kind: str, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        if isinstance(tensor, FakeTensor):
            return FakeWork()
        other = self.members[peer]
        if other != self._like[peer]:
            raise StrictError(
                f"{kind}: rank {other} has no process, as it does what rank {self._like[peer]} does "
                f"(Strict(alike={self._player.strict.alike})); let messages go between ranks that have one"
            )
        if other == self._player.rank:
            raise StrictError(f"{kind} of rank {other} to itself: NCCL cannot; copy the tensor")
        self._check(kind, tensor)
        self._report(kind, [tensor], [])
        part = Part(kind=kind, peer=other, elements=tensor.numel(), dtype=_type(tensor), tag=tag)
        batch = batch_around()
        if batch is not None:
            return self._add_to_batch(batch, part, tensor)
        pair = tuple(sorted((self._player.rank, other)))
        self._connect(pair)
        sent, received = ([tensor], []) if kind == "send" else ([], [tensor])
        operation = Operation(name=kind, parts=(part,), sites=sites())
        place = 0 if pair[0] == other else 1

        def compute(shares: Sequence[Share]) -> list[bytes]:
            return [shares[place][1]] if received else []

        return self._start(f"{self._title}, messages of {list(pair)}", pair, operation, sent, received, compute)

    def _start(
        self,
        communicator: str,
        present: tuple[int, ...],
        operation: Operation,
        inputs: list[Tensor],
        outputs: list[Tensor],
        compute: Compute,
        *,
        joined: tuple[int, ...] = (),
    ) -> StrictWork:
        """Hands an operation to the player, and to the device on which its tensors lie, if they lie on one.

        Args:
            communicator: The name of the communicator.
            present: The ranks that it joins and that have a process.
            operation: What is asked for.
            inputs: What it reads.
            outputs: What it writes.
            compute: From the shares of `present` to the bytes of this rank's outputs.
            joined: All ranks that it joins.
        """
        device, on_device = self._player.device, None
        tensors = [each for each in (*inputs, *outputs) if not each.is_cpu]
        if device is not None and tensors:  # before the buffers are poisoned: it may raise
            on_device = device.issue(communicator, operation.name, inputs, outputs)
        buffers = Buffers(inputs, outputs, device)
        work = self._player.issue(communicator, present, operation, buffers, compute, joined)
        work.on_device = on_device
        return work

    def _add_to_batch(self, frame: FrameType, part: Part, tensor: Tensor) -> BatchedMessage:
        """Collects the messages of a `batch_isend_irecv`, which are one operation; the last one issues it."""
        operations = frame.f_locals["p2p_op_list"]
        if self._batch is None:
            self._batch = MessageBatch()
        batch = self._batch
        batch.parts.append((part, tensor))
        if len(batch.parts) == len(operations):
            self._batch = None
            self._issue_batch(batch)
        return BatchedMessage(batch)

    def _connect(self, pair: tuple[int, ...]) -> None:
        """Notes that the communicator of all members, or of a pair of them, is used, which may be for the first time.

        Raises:
            HostWaitError, FirstUseError: It is, where communicators have to be connected.
        """
        if pair not in self._connected:
            if self._player.strict.connect == "setup":
                check_first_use(f"messages of {list(pair)} over {self._title}" if pair else self._title)
            self._connected.add(pair)

    def _issue_batch(self, batch: MessageBatch) -> None:
        self._connect(())
        sent = [tensor for part, tensor in batch.parts if part.kind == "send"]
        received = [(part, tensor) for part, tensor in batch.parts if part.kind == "recv"]
        operation = Operation(name="batch", parts=tuple(part for part, _ in batch.parts), sites=sites())

        def compute(shares: Sequence[Share]) -> list[bytes]:
            waiting = {entry.rank: messages_to(self._player.rank, entry.operation, data) for entry, data in shares}
            return [waiting[part.peer].pop(0) for part, _ in received]

        outputs = [tensor for _, tensor in received]
        batch.work = self._start(self._title, self._present, operation, sent, outputs, compute)

    def _reduction(self, asked: Any, tensors: Sequence[Tensor]) -> str:
        """The name of what is done to the numbers."""
        asked = getattr(asked, "reduceOp", asked)
        asked = getattr(asked, "op", asked)
        name = "sum" if asked is None else str(asked).rpartition(".")[2].lower()
        if name not in REDUCTIONS:
            raise StrictError(f"{name}: NCCL does not know this reduction; use one of {', '.join(sorted(REDUCTIONS))}")
        for tensor in tensors:
            if _type(tensor).startswith("float8"):
                raise StrictError(f"{name} of {_type(tensor)}: NCCL cannot add these numbers; cast them first")
            if name == "avg" and tensor.dtype == torch.bool:
                raise StrictError("avg of bool: NCCL cannot; cast it first")
        return name

    def _combined(self, tensors: Iterable[Sequence[Tensor]], reduction: str) -> list[bytes]:
        """Each tensor of all members, combined."""
        return [bytes_of(reduced(members, reduction, self._player.strict.sums)) for members in tensors]

    def _splits(self, tensor: Tensor, splits: Sequence[int]) -> tuple[int, ...]:
        """The elements for each member, of splits that are given in rows."""
        if not splits:
            ranks = len(self.members)
            return (tensor.numel() // ranks,) * ranks
        row = tensor[0].numel() if len(tensor) else 1
        return tuple(rows * row for rows in splits)

    def _check(self, name: str, tensor: Tensor) -> None:
        """Refuses tensors that NCCL would."""
        if tensor.is_sparse or not tensor.is_contiguous():
            raise StrictError(
                f"{name} of a tensor that is not contiguous, {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}: NCCL cannot; call contiguous() first"
            )
        if tensor.device.type not in device_types(self._player.device):
            raise StrictError(f"{name} of a tensor on {tensor.device}: a strict group is for the CPU")

    def _check_size(self, name: str, tensor: Tensor, elements: int) -> None:
        if tensor.numel() != elements:
            raise StrictError(f"{name}: a tensor has {tensor.numel()} elements; {self.size()} ranks need {elements}")

    def _report(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Tells the counters of this thread, which do not see what goes past torch's dispatcher."""
        tensors = inputs or outputs
        whole = max(tensors, outputs, key=lambda each: sum(tensor.numel() for tensor in each))
        if name in ("gather", "scatter"):
            report(name, self.members, [(tensors[0].numel() * self.size(), tensors[0].dtype)] if tensors else [])
            return
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors if name == "all_to_all" else whole:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        report(name, self.members, [(elements, dtype) for dtype, elements in sizes.items()] or [(0, torch.uint8)])


def device_types(device: DeviceOfRank | None) -> list[str]:
    """The types of devices whose tensors a group takes."""
    return ["cpu"] if device is None else ["cpu", device.type]


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _lists(tensors: Any) -> list[list[Tensor]]:
    """Lists of tensors, where one list may stand for one in a list."""
    lists = list(tensors)
    return [lists] if lists and isinstance(lists[0], Tensor) else [list(one) for one in lists]
