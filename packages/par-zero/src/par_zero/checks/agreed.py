"""Agreement of the ranks before anything is changed: all raise if one has a problem, or if they differ."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist

from par_groups import agree, check_alike

from .._policies import ShardOptions
from ..layout.plan import ChunkPlan, Member
from ..layout.sharers import DataParallelGroup


def described(
    members: Sequence[Member],
    stage: int,
    options: ShardOptions,
    share: int = 0,
) -> str:
    """Return a text of everything that must be equal on all ranks, so that they make the same chunks.

    Args:
        members: Parameters.
        stage: ZeRO stage.
        options: All options.
        share: Index of the data-parallel group whose ranks compare the text. The ranks of the first group compare all
            parameters, but not the shapes of parameters of the other groups, such as more or fewer experts. The ranks
            of another group compare only its own parameters.
    """
    parts = [
        (
            *(member.names, tuple(member.shape) if member.share == share else (), str(member.parameter.dtype)),
            member.place,
            *(member.group, member.owner, member.atomic, member.assembled, member.share),
            member.parameter.requires_grad and member.group < 0,
        )
        for member in members
        if share in (0, member.share)
    ]
    fields = (stage, options.overlap.bucket, options.overlap.inflight, options.precision)
    return repr((fields, parts))


class Agreed(NamedTuple):
    """Result of the ranks' agreement.

    Attributes:
        ranks: All ranks of the first data-parallel group and of its replicas, in ascending order.
        used: Whether chunks of another module use a communicator of each group, on any rank.
    """

    ranks: tuple[int, ...]
    used: tuple[bool, ...]


def agreed(
    problem: Exception | None, texts: Sequence[str], shares: Sequence[DataParallelGroup], used: Sequence[bool]
) -> Agreed:
    """Agree with the other ranks on whether to continue. Gathers objects over each group. Collective.

    Args:
        problem: Error of this rank, if there is one.
        texts: Text from `described` for each group, which must be equal on all its ranks.
        shares: Data-parallel groups. The first is `group` of `shard`.
        used: Whether chunks of another module use a communicator of each group.

    Raises:
        Exception: `problem` itself.
        ValueError: Another rank has a problem, or the ranks differ.
    """
    what, remedy = "parameters, shapes, dtypes, param groups or options", "build the same model and optimizer on all"
    heard = []
    for share, text, is_used in zip(shares, texts, used, strict=True):
        try:
            # The text contains every parameter of the model, so the ranks exchange only its digest.
            mine = (hashlib.sha256(text.encode()).hexdigest(), len(shares), is_used)
            said = agree(problem, mine, *share.groups)
        except Exception as error:  # ranks of the next group still wait for this rank
            problem = error
            continue
        # Ranks with different numbers of groups would wait for each other in the next exchange, so this raises at once.
        check_alike({rank: count for rank, (_, count, _) in said.items()}, "numbers of shares")
        try:
            check_alike({rank: digest for rank, (digest, *_) in said.items()}, what, remedy=remedy, show=False)
        except ValueError as error:
            problem = error
        heard.append(said)
    if problem is not None:
        raise problem
    return Agreed(tuple(heard[0]), tuple(any(is_used for *_, is_used in said.values()) for said in heard))


class PlannedChunks(NamedTuple):
    """Chunks that all ranks have agreed on, and the groups that an agreement must include.

    Attributes:
        plans: Chunks of this rank, each with the largest size that any rank has at its index.
        reach: Whether each data-parallel group has ranks that the first group of some rank does not have.
    """

    plans: list[ChunkPlan]
    reach: tuple[bool, ...]


def agreed_chunks(plans: Sequence[ChunkPlan], shares: Sequence[DataParallelGroup]) -> PlannedChunks:
    """Agree on the order of all chunks, and on which groups connect ranks that the first group of some rank does not.

    Gathers objects over each group, unless there is only one. Collective.

    Args:
        plans: Chunks.
        shares: Data-parallel groups. The first is `group` of `shard`.

    Raises:
        ValueError: The chunks differ between ranks.
    """
    # With one group, the equal texts of `agreed` imply equal chunks on all ranks.
    if len(shares) == 1:
        return PlannedChunks(list(plans), (True,))
    first = set(dist.get_process_group_ranks(shares[0].group))
    chunks = [(plan.share, plan.place, [member.names for member in plan.members]) for plan in plans]
    reach = [not number or not set(share.near) <= first for number, share in enumerate(shares)]
    sizes = [(plan.layout.size, plan.layout.shard) for plan in plans]
    said = agree(None, (chunks, reach, sizes), *(group for share in shares for group in share.groups))
    what, remedy = "chunks", "parameters that not all ranks share need names and sizes that are alike on all"
    check_alike({rank: theirs for rank, (theirs, *_) in said.items()}, what, remedy=remedy, show=False)
    of_all = zip(*(theirs for *_, theirs in said.values()), strict=True)
    return PlannedChunks(
        [
            # Ranks may hold different numbers of experts. Decisions by the largest sizes are the same on all of them.
            replace(plan, most=max(size for size, _ in sizes), most_kept=max(kept for _, kept in sizes))
            for plan, sizes in zip(plans, of_all, strict=True)
        ],
        tuple(map(any, zip(*(theirs for _, theirs, _ in said.values()), strict=True))),
    )
