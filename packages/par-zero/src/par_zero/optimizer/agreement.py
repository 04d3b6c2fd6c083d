"""What tensor ranks have of each other's parameters: they tell each other before anything is changed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from par_groups import Sharding, agree, check_alike

from .._stage import ZeroStage
from ..layout.build import ChunkPlan
from .blocks import MatrixBlock, blocks_of


class _Claim(NamedTuple):
    """A parameter that is put together.

    Attributes:
        owner: Number of its optimizer.
        name: Its name.
        dtype: Its dtype, as a text.
        share: Which share of the data ranks it lies in; 0 if each of them steps all of it.
        record: What the rank that claims it has of it.
    """

    owner: int
    name: str
    dtype: str
    share: int
    record: Sharding


def agreed_blocks(
    problem: Exception | None,
    plans: Sequence[ChunkPlan],
    records: Mapping[nn.Parameter, Sharding],
    ranks: Sequence[int],
    tensor: dist.ProcessGroup | None,
    stage: ZeroStage,
) -> dict[nn.Parameter, list[MatrixBlock]]:
    """The blocks of every parameter that is put together. Objects are gathered over the tensor group.

    Args:
        problem: What this rank or one with which it shares cannot do, if there is something.
        plans: The chunks.
        records: The parameters' records, before they are cut over data ranks.
        ranks: The ranks of the groups over which the module is sharded.
        tensor: The ranks that have parts. None: this rank has all of them.
        stage: The ZeRO stage.

    Raises:
        Exception: The problem, as it is.
        ValueError: Another rank's problem, or parts that do not fit together.
    """
    claims: dict[nn.Parameter, _Claim] = {}
    for plan in plans:
        for member, share in zip(plan.members, plan.layout.owners, strict=False):  # none where parameters are cut
            if member.assembled:
                claims[member.parameter] = _Claim(
                    owner=member.owner,
                    name=member.names[0],
                    dtype=str(member.parameter.dtype),
                    share=share if stage.shards_state else 0,
                    record=records[member.parameter],
                )
    said = agree(problem, (list(claims.values()), tuple(ranks)), *([] if tensor is None else [tensor]))
    remedy = "build the same model and optimizers on all, and at stage 3 name the units: units=[...]"
    own = {rank: [claim[:4] for claim in theirs] for rank, (theirs, _) in said.items()}
    check_alike(own, "parameters for the ranks of tensor_group to put together", remedy=remedy, show=False)
    near = {rank for _, of_rank in said.values() for rank in of_rank}
    in_order = [dist.get_rank()] if tensor is None else dist.get_process_group_ranks(tensor)
    of_ranks = [said[rank][0] for rank in in_order]
    together: dict[tuple[int, int], list[tuple[nn.Parameter, list[Sharding]]]] = {}
    for number, (parameter, claim) in enumerate(claims.items()):
        found = [theirs[number].record for theirs in of_ranks]
        far = sorted({rank for record in found for box in record.boxes for rank in box.copies} - near)
        if far:
            raise ValueError(
                f"{claim.name!r} has copies on the ranks {far} too, such as those of another pipeline stage, which "
                "neither share it with this one nor have parts of it, so they would put it together by themselves; "
                "give it to an optimizer that works element by element"
            )
        together.setdefault((claim.owner, claim.share), []).append((parameter, found))
    blocks: dict[nn.Parameter, list[MatrixBlock]] = {}
    for members in together.values():  # each share's ranks deal out what lies there
        names = {claims[parameter].name: parameter for parameter, _ in members}
        for block in blocks_of([(claims[parameter].name, found) for parameter, found in members]):
            blocks.setdefault(names[block.name], []).append(block)
    return blocks
