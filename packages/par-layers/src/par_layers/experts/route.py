"""The exchange of routed tokens of one layer: split sizes, permutations and messages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from .._collectives import start_exchange
from .._torch_private import sums_of_bags
from .rows import PADDING, by_expert, extended, inverse


def out_of_range(ranks: list[int], experts: int) -> str:
    """Return the message for expert ids out of range.

    Args:
        ranks: Global ranks with such ids; empty if only the device has seen them.
        experts: Number of experts, E.
    """
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "this rank"
    return (
        f"ids of {who} are out of range 0 .. {experts - 1}: a router returns such ids for NaN scores; find the first "
        "NaN in its input and remove its cause"
    )


class PendingExchange:
    """All-to-all that one autograd function begins and the next one finishes, in forward and in backward.

    The unfinished tensor cannot pass between the two as the gradient itself, because autograd checks its shape.

    Args:
        group: Process group of the exchange.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # By name: an autograd graph that holds the group and is alive at exit aborts the process.
        self._group = group.group_name
        self._finish: Callable[[], Tensor] | None = None

    def begin(self, x: Tensor, sizes: list[int], expected: list[int]) -> None:
        """Begin to send `sizes` rows of x to the ranks, and to receive `expected` rows from them."""
        self._finish = start_exchange(x, sizes, expected, self._group)

    def finish(self) -> Tensor:
        """Wait for the received rows and return them."""
        finish, self._finish = self._finish, None
        if finish is None:
            raise RuntimeError("finish() was called before begin(); this is a bug in par-layers, please report it")
        return finish()

    def wait(self) -> Tensor:
        """Wait for the received rows; a later `finish` returns them again."""
        arrived = self.finish()
        # The rows were waited for early, to read the numbers that travel with them; Receive still needs them.
        self._finish = lambda: arrived
        return arrived

    def exchange(self, x: Tensor, sizes: list[int], expected: list[int]) -> Tensor:
        """Begin and finish an exchange, and return the received rows."""
        self.begin(x, sizes, expected)
        return self.finish()


@dataclass(eq=False)
class Splits:
    """Split sizes of one all-to-all, and the permutation of its result.

    Args:
        sizes: Number of rows that this rank sends to each rank.
        expected: Number of rows that this rank receives from each rank.
        received: Sum of `expected`.
        counts: Number of rows of each expert of this rank, int64 [E / p]; or from each rank, [E / p, p].
        to_experts: Permutation from the order of arrival to the order of experts, int64; None if both are the same.
        to_sources: Inverse permutation.
    """

    sizes: list[int]
    expected: list[int]
    received: int
    counts: Tensor
    to_experts: Tensor | None = None
    to_sources: Tensor | None = None


def exchange_counts(counts: Tensor, group: dist.ProcessGroup, *, by_source: bool) -> Callable[[], Splits]:
    """Begin to exchange the number of rows that each rank sends to each expert.

    Args:
        counts: Number of this rank's rows for each expert, int64 [p, E / p]. All are negative if this rank has ids out
            of range, so that the other ranks learn of the error without another collective.
        group: Process group of the exchange.
        by_source: Whether the splits count the rows of each expert from each rank.

    Returns:
        Function that waits and returns the splits. It raises ValueError on all ranks if one has ids out of range.
    """
    experts = counts.numel()
    ones = [1] * len(counts)
    finish = start_exchange(counts, ones, ones, group.group_name)

    def settle() -> Splits:
        arriving = finish()
        # One stacked read instead of two: each read makes the host wait for the device.
        leaving_rows, arriving_rows = torch.stack((counts, arriving)).tolist()
        wrong = [rank for rank, row in enumerate(arriving_rows) if min(row) < 0]
        if wrong:
            raise ValueError(out_of_range([dist.get_global_rank(group, rank) for rank in wrong], experts))
        expected = [sum(row) for row in arriving_rows]
        of_experts = zip(*arriving_rows, strict=True)
        total = sum(expected)
        to_experts = by_expert(arriving, total)
        return Splits(
            [sum(row) for row in leaving_rows],
            expected,
            total,
            torch.tensor([column if by_source else sum(column) for column in of_experts], device="cpu"),
            to_experts,
            None if to_experts is None else inverse(to_experts),
        )

    return settle


class Route:
    """Permutation and exchange of the routed tokens of one dispatch.

    Args:
        width: Features of a row, h.
        dtype: Dtype of the gates.
        tokens: Index of the token in each sent row, int64 [n]; M for an empty slot.
        order: Index in the flattened [M, k] of each sent row, int64 [n]; M * k for an empty slot.
        places: Index of the sent row of each routed token, int64 [M, k]; n if the token is dropped.
        settle: Function that returns the splits; it may wait for other ranks.
        group: Process group of the exchange; None for one device.
        dropped: Number of dropped routed tokens, int64 []; None without a capacity.
        own: Number of tokens of this rank, sent with its rows; None sends none.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        tokens: Tensor,
        order: Tensor,
        places: Tensor,
        *,
        settle: Callable[[], Splits],
        group: dist.ProcessGroup | None,
        dropped: Tensor | None = None,
        own: int | None = None,
    ) -> None:
        self.width, self.dtype, self.own = width, dtype, own
        self.tokens, self.order, self.places, self.dropped = tokens, order, places, dropped
        self._settle = settle
        if group is not None:
            self.pending = PendingExchange(group)

    @cached_property
    def _bags(self) -> Tensor:
        """Offset of each token's first entry in the flattened `places`, int64 [M]."""
        return torch.arange(0, self.places.numel(), self.places.shape[1], device=self.places.device)

    @cached_property
    def splits(self) -> Splits:
        """Split sizes of the exchange. The first access may wait for other ranks."""
        return self._settle()

    def taken(self, x: Tensor) -> Tensor:
        """Gather the sent rows [n, h] from tokens [M, h]; empty slots are zero."""
        return self._extended(x).index_select(0, self.tokens)

    def taken_gates(self, gates: Tensor) -> Tensor:
        """Gather the gates [n] of the sent rows from [M, k]; empty slots are zero."""
        return self._extended(gates.flatten()).take(self.order)

    def summed(self, rows: Tensor) -> Tensor:
        """Sum the rows of each token, [n, h] to [M, h]."""
        # As an embedding bag, and not as `index_add`, whose atomics on a GPU add in another order every time.
        if not self.places.numel():
            return rows.new_zeros(len(self.places), rows.shape[1])
        return sums_of_bags(self._extended(rows), self.places.flatten(), self._bags)

    def placed_gates(self, gates: Tensor) -> Tensor:
        """Scatter the gradients of the sent rows' gates, [n] to [M, k]."""
        return self._extended(gates).take(self.places)

    def _extended(self, x: Tensor) -> Tensor:
        """Append a zero row if a capacity is set: empty slots and dropped tokens index it."""
        return x if self.dropped is None else extended(x)

    def pack(self, x: Tensor, gates: Tensor) -> Tensor:
        """Pack tokens [M, h] and gates [M, k] into one message, [n, h + padding], so that gates cost no collective."""
        packed = self._packed(self._extended(x), self.tokens, self.taken_gates(gates))
        if self.own is not None:
            said = torch.tensor([self.own], dtype=torch.int64, device="cpu").view(packed.dtype)
            # The padding of every row carries this rank's number of tokens, so agreeing costs no collective of its own.
            packed[:, -len(said) :] = said
        return packed

    def heard(self) -> int:
        """Wait for the rows and return the highest number of tokens of any rank, which each rank sent with its rows."""
        packed = self.pending.wait()
        # Every source sends equally many rows, so one row of each source is enough.
        of_ranks = packed[:: self.splits.expected[0], -(8 // packed.dtype.itemsize) :]
        return int(of_ranks.contiguous().view(torch.int64).max())

    def pack_back(self, rows: Tensor, gates: Tensor) -> Tensor:
        """Pack gradients of received rows [R, h] and gates [R] in the order of their sources, [R, h + padding]."""
        index = self.splits.to_sources
        return self._packed(rows, index, gates if index is None else gates.index_select(0, index))

    def _packed(self, x: Tensor, index: Tensor | None, gates: Tensor) -> Tensor:
        number, size = gates.numel(), x.dtype.itemsize
        packed = x.new_empty(number, self.width + PADDING // size)
        if index is None:
            packed[:, : self.width] = x
        else:
            torch.index_select(x, 0, index, out=packed[:, : self.width])
        wide = gates.dtype.itemsize // size
        packed[:, self.width : self.width + wide] = gates.contiguous().view(x.dtype).view(number, wide)
        return packed

    def gates_of(self, packed: Tensor, index: Tensor | None) -> Tensor:
        """Unpack the gates [n] of a message, permuted by `index` if it is not None."""
        wide = self.dtype.itemsize // packed.dtype.itemsize
        bits = packed[:, self.width : self.width + wide]
        bits = bits.contiguous() if index is None else bits.index_select(0, index)
        return bits.view(self.dtype).flatten()
