"""Agreement of tensor-parallel ranks on the parameters that they assemble, before anything is changed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from par_groups import Sharding, agree, check_alike

from .._stage import ZeroStage
from ..layout.plan import ChunkPlan
from .blocks import MatrixBlock, blocks_of


class _Claim(NamedTuple):
    """Parameter that is assembled.

    Attributes:
        owner: Number of the optimizer.
        name: Name of the parameter.
        dtype: Text of the dtype.
        share: Index of the data rank that steps it; 0 if each data rank steps all parameters.
        record: Sharding metadata of the parameter on the rank that makes the claim.
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
    """Return the blocks of every assembled parameter. Gathers objects over the tensor group. Collective.

    Args:
        problem: Error of this rank or of a rank of its data-parallel groups, if there is one.
        plans: Plans of the chunks.
        records: Sharding metadata of the parameters before data-parallel ranks shard them.
        ranks: Ranks of the groups over which the module is sharded.
        tensor: Ranks that hold shards. None: this rank holds full parameters.
        stage: ZeRO stage.

    Raises:
        Exception: `problem` itself.
        ValueError: Another rank has a problem, or the shards do not fit together.
    """
    claims: dict[nn.Parameter, _Claim] = {}
    for plan in plans:
        # Only layouts of full tensors have owners, so the loop skips all other chunks.
        for member, share in zip(plan.members, plan.layout.owners, strict=False):
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
    # A replica outside of these ranks would be assembled and stepped by a rank that this exchange does not reach.
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
    # Blocks are assigned for each data rank separately, so that each of its tensor-parallel ranks gets equal work.
    for members in together.values():
        names = {claims[parameter].name: parameter for parameter, _ in members}
        for block in blocks_of([(claims[parameter].name, found) for parameter, found in members]):
            blocks.setdefault(names[block.name], []).append(block)
    return blocks
