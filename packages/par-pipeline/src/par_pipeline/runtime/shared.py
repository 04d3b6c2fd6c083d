"""Parameters that several stages use, such as the embedding of a language model that is also its last layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import Box, Sharding, agree, attributes, gradients, sendable, set_sharding, sharding_of, whole, written_

Cuts = list[list[tuple[tuple[int, ...], tuple[int, ...]]]]
"""For each parameter, the boxes whose gradients a holder has: their starts and sizes."""

Exchange = Callable[[Cuts | None, list[Tensor]], Sequence[tuple[Cuts | None, Sequence[Tensor]]]]
"""From what one holder gives to what each of them gives, in their order: cuts, unless they are known, and tensors."""


class Shared:
    """Parameters that several pipeline ranks share, such as the weight of an embedding and of the head.

    All ranks start from the same values, and their gradients are summed. The sharding metadata marks the parameters as
    replicas, so that a gradient norm and a checkpoint count them once. Create this object before a data-parallel
    wrapper or an optimizer with fp32 masters reads the metadata. Two stages on the same rank do not need it: they can
    use one parameter. The constructor and all methods are collective over the group.

    Args:
        parameters: This rank's parameters, by name in its stage. Names may differ between ranks; the order and the
            shapes must be equal. Empty on a rank whose stages use none of them.
        group: Process group of the pipeline.
        replicas: Process group of the ranks that run the same stages on other data. Default: no such ranks.
        optimizer: Optimizer of this rank's parameters, if it stores their gradients itself, as under par-zero.
            Default: the gradients are in `parameter.grad`.

    Raises:
        ValueError: The ranks have different numbers, shapes or dtypes, or a parameter is frozen on some of them; on
            every rank.

    Example:
        mine = {"embedding.weight": stage.embedding.weight} if pipeline_rank == 0 else {}
        shared = Shared(mine or {"head.weight": stage.head.weight}, group)  # of two ranks
        pipeline = Pipeline(stage, schedule, group, loss_fn=loss_fn, shared=[shared])
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        replicas: dist.ProcessGroup | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self._parameters, self._group, self._optimizer = dict(parameters), group, optimizer
        copies = [dist.get_rank()] if replicas is None else dist.get_process_group_ranks(replicas)
        mine = []
        for parameter in self._parameters.values():
            # Without metadata, a parameter is unsharded on this rank and its replicas.
            has_metadata = attributes.SHARDING.is_on(parameter)
            sharding = sharding_of(parameter) if has_metadata else whole(parameter.shape, copies)
            # A parameter that only some holders train would drift from its copies, so the text makes this a part of the
            # comparison.
            kind = f"{parameter.dtype}{'' if parameter.requires_grad else ' frozen'}"
            mine.append((kind, sharding))
        by_rank = self._gathered(mine)
        self._holders = [rank for rank, theirs in enumerate(by_rank) if theirs]
        _check([by_rank[rank] for rank in self._holders])
        self._are_cuts_checked = False
        for number, parameter in enumerate(self._parameters.values()):
            set_sharding(parameter, _joined([by_rank[rank][number][1] for rank in self._holders]))
            # The copies are initialized independently, with different random numbers, until the first holder's values
            # replace them.
            self._start_alike_(parameter)

    def begin_step(self) -> None:
        """Zero the accumulated gradients on all holders but the first, so that the next sum counts them once.

        `Pipeline` calls this method at the start of each step. It is not needed if you call `handle_gradient` once for
        several steps. No communication.
        """
        if dist.get_rank(self._group) in self._holders[1:]:
            for views in self._views():
                for _, view in views:
                    view.zero_()

    def handle_gradient(self) -> None:
        """Set every holder's gradient to the sum over the holders, added in the same order on every rank."""

        def exchange(cuts: Cuts | None, mine: list[Tensor]) -> Sequence[tuple[Cuts | None, Sequence[Tensor]]]:
            cuts_of_all = [None] * len(self._holders)
            if cuts is not None:
                by_rank = self._gathered(cuts)
                cuts_of_all = [by_rank[rank] for rank in self._holders]
            parts_of_all = zip(*map(self._exchanged, mine), strict=True) if mine else [()] * len(self._holders)
            return list(zip(cuts_of_all, parts_of_all, strict=True))

        if len(self._holders) > 1:
            self.sum_gradients(exchange)

    def sum_gradients(self, exchange: Exchange) -> None:
        """Do the same as `handle_gradient` over a connection of the caller. Only the holders need to call it.

        Args:
            exchange: Function that sends this holder's values to the other holders, and returns the values of all.
        """
        absent = self._fill_() if self._optimizer is None else set()
        # The views are taken after `_fill_`, which may have replaced gradients.
        views_of_all = self._views()
        kept: list[tuple[nn.Parameter, list[Tensor]]] = []
        mine = []
        for parameter, views in zip(self._parameters.values(), views_of_all, strict=True):
            if not views:  # a data-parallel rank that keeps nothing of this parameter
                continue
            parts = [view.reshape(-1) for _, view in views]
            if self._optimizer is None:
                # The flag travels with the gradients instead of in a message of its own: a parameter that no holder
                # used must keep `grad = None`, so that an optimizer skips it.
                parts.append(parts[0].new_full((1,), float(id(parameter) not in absent)))  # whether anybody used it
            mine.append(torch.cat(parts))
            kept.append((parameter, [view for _, view in views]))
        cuts = [[(box.start, box.size) for box, _ in views] for views in views_of_all]
        given = exchange(None if self._are_cuts_checked else cuts, mine)
        self._check_cuts(cuts, [theirs for theirs, _ in given])
        summands = zip(*(tensors for _, tensors in given), strict=True)
        for (parameter, own), theirs in zip(kept, summands, strict=True):
            # Every holder adds in the order of the holders, so that all get bitwise the same sum and the copies never
            # drift apart.
            total = torch.stack(theirs).sum(0)
            sums = total.split([view.numel() for view in own] + [1] * (self._optimizer is None))
            for view, part in zip(own, sums, strict=False):
                # The gradients are written in place, because an optimizer such as par-zero's holds them in its own
                # buffers.
                view.copy_(part.view(view.shape))
            if id(parameter) in absent and total[-1] == 0:  # nobody used it, so the optimizer is to leave it alone
                parameter.grad = None

    def holders_in(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """Return the ranks of a pipeline that hold the shared parameters.

        Raises:
            ValueError: One of them is not in the pipeline.
        """
        ranks = [dist.get_global_rank(self._group, holder) for holder in self._holders]
        outside = sorted(set(ranks).difference(dist.get_process_group_ranks(group)))
        if outside:
            raise ValueError(
                f"ranks {outside} have shared parameters, but are not in the pipeline; give Shared the pipeline's group"
            )
        return tuple(dist.get_group_rank(group, rank) for rank in ranks)

    def _fill_(self) -> set[int]:
        """Make gradients dense, and those that are not there zero; return the ids of the latter's parameters."""
        absent = set()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                absent.add(id(parameter))
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:  # an embedding's, while a linear layer has a dense one of the same weight
                parameter.grad = parameter.grad.to_dense()
        return absent

    def _views(self) -> list[list[tuple[Box, Tensor]]]:
        """Return this rank's parts of each parameter's gradient."""
        views: dict[str, list[tuple[Box, Tensor]]] = {name: [] for name in self._parameters}
        for name, box, view in gradients(self._named_tensors()):
            if name in views:
                views[name].append((box, view))
        return list(views.values())

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that have gradients. An optimizer may hold the parameters under other names or none."""
        if self._optimizer is None:
            yield from self._parameters.items()
            return
        # An optimizer lists parameters in its own order, and a sharded one lists tensors that only know their names.
        own = {id(parameter): name for name, parameter in self._parameters.items()}
        for group in self._optimizer.param_groups:
            names = group.get("param_names") or [""] * len(group["params"])
            for name, tensor in zip(names, group["params"], strict=True):
                yield own.get(id(tensor), name), tensor

    def _check_cuts(self, mine: Cuts, cuts_of_all: Sequence[Cuts | None]) -> None:
        """Check that all holders have the same parts; None for a holder that has checked it."""
        first = cuts_of_all[0] or mine
        for rank, cuts in zip(self._holders, cuts_of_all, strict=True):
            if cuts is not None and cuts != first:
                raise ValueError(
                    f"the gradients of shared parameters are cut otherwise on rank {rank} of the pipeline than on rank "
                    f"{self._holders[0]}; make Shared(...) before the optimizer is sharded, and give it `optimizer`"
                )
        # The sharding cannot change later, so further steps send the gradients only.
        self._are_cuts_checked = True

    def _start_alike_(self, parameter: nn.Parameter) -> None:
        """Copy the values of the first holder to all holders."""
        if len(self._holders) > 1:
            with torch.no_grad():
                parameter.copy_(self._exchanged(parameter.detach().contiguous())[0])
            # Master weights and similar copies must follow the new values.
            written_([parameter])

    def _exchanged(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all holders. Each holder sends its tensor to every other holder, point to point.

        Pair by pair, the lower rank first: NCCL has a communicator for each pair, which does one thing after another. A
        batch of them would be one of the whole group, which other ranks take no part in.
        """
        rank, device = dist.get_rank(self._group), mine.device
        mine = sendable(mine, self._group)
        tensors = [mine if holder == rank else torch.empty_like(mine) for holder in self._holders]
        works: list[Any] = []
        for holder, theirs in zip(self._holders, tensors, strict=True):
            if holder == rank:
                continue
            # Both ranks of a pair issue their two operations in the same order, because NCCL runs the operations of a
            # pair one after the other.
            acts = [(dist.isend, mine, "group_dst"), (dist.irecv, theirs, "group_src")]
            for act, tensor, peer in acts if rank < holder else reversed(acts):
                works.append(act(tensor, group=self._group, **{peer: holder}))
        for work in works:
            work.wait()
        return [tensor.to(device) for tensor in tensors]

    def _gathered(self, mine: Any) -> list[Any]:
        """All-gather a small object over the group."""
        return list(agree(None, mine, self._group).values())


def _joined(records: Sequence[Sharding]) -> Sharding:
    """Merge sharding metadata that differs only in the replicas; the result lists the replicas of all."""
    boxes = []
    for same in zip(*(record.boxes for record in records), strict=True):
        copies = {rank for box in same for rank in box.copies}
        boxes.append(replace(same[0], copies=tuple(sorted(copies))))
    return Sharding(records[0].shape, tuple(boxes))


def _check(parameters_of_holders: Sequence[Sequence[tuple[str, Sharding]]]) -> None:
    """Check that all holders have the same kinds of parameters. Every rank sees the same, and raise the same."""
    described = [
        [(kind, record.shape, [(box.start, box.size) for box in record.boxes]) for kind, record in parameters]
        for parameters in parameters_of_holders
    ]
    for theirs in described[1:]:
        if theirs != described[0]:
            raise ValueError(
                f"the holders of shared parameters have {described[0]} and {theirs} (dtype, shape, boxes); give the "
                "same parameters, in the same order, on each"
            )


def check_shared(shared: object) -> None:
    """Raise TypeError if this is no sequence of `Shared`."""
    if not isinstance(shared, Sequence):
        raise TypeError(f"shared is a {type(shared).__name__}; give a list of Shared")
    stranger = next((each for each in shared if not isinstance(each, Shared)), None)
    if stranger is not None:
        raise TypeError(f"shared has a {type(stranger).__name__} in it; give a list of Shared")
