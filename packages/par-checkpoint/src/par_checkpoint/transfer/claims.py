"""What all ranks hold, told by those that hold something different from others."""

from collections.abc import Sequence

from ..plan.claims import Claims
from .ranks import Ranks, words


def words_of(claims: Claims, rank: int) -> list[int]:
    """Integers whose sums over all ranks stand for what every rank claims, where only equality counts."""
    return words(rank.to_bytes(8) + claims.table() + claims.boxes())


def claims_of_all(ranks: Ranks, mine: Claims) -> list[tuple[Sequence[int], Claims]]:
    """Ranks, and what each of them claims; equal claims once. Collective.

    Names, dtypes and shapes are told by one rank of each pipeline stage; the rest are some dozens of rows a rank.

    Args:
        ranks: The ranks.
        mine: What this rank claims.
    """
    tables = ranks.distinct_bytes(mine.table())
    table_of = {rank: number for number, (holders, _) in enumerate(tables) for rank in holders}
    decoded = [Claims.decode_table(data) for _, data in tables]
    every = ranks.distinct_bytes(table_of[ranks.rank].to_bytes(8) + mine.boxes())
    return [(holders, decoded[table_of[holders[0]]].with_boxes(data[8:])) for holders, data in every]
