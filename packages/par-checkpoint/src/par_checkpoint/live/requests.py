"""Messages about pieces between takers and givers, straight from rank to rank."""

from collections.abc import Mapping, Sequence

import torch

from par_groups import Claims, bytes_of

from ..transfer.ranks import Ranks

Rows = dict[int, torch.Tensor]

_HEAD = 8  # bytes in front of a request, with its length


def exchange_requests(ranks: Ranks, requests: Mapping[int, Rows]) -> dict[int, Rows]:
    """Send a request to each giver; return the rows of the requests that this rank receives, by taker. Collective.

    Args:
        ranks: The ranks.
        requests: Rows by giver: see `Claims.rows`.
    """
    # One bit for each giver tells it that a request will come. The requests themselves are of no use to others.
    mine = sum(1 << giver for giver in requests).to_bytes(-(-ranks.size // 8))
    told = ranks.distinct_bytes(mine)
    takers = {taker for holders, bits in told if int.from_bytes(bits) >> ranks.rank & 1 for taker in holders}
    # In step s, rank r sends to r + s and receives from r - s, so that no two steps wait for each other in a circle.
    steps = {(giver - ranks.rank) % ranks.size for giver in requests}
    steps |= {(ranks.rank - taker) % ranks.size for taker in takers}
    found: dict[int, Rows] = {}
    for step in sorted(steps):
        to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        sending = []
        if to in requests:
            data = Claims(tensors=(), rows=requests[to]).boxes()
            for message in (len(data).to_bytes(_HEAD), data):
                sending.append(ranks.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), to))
        if source in takers:
            head = torch.empty(_HEAD, dtype=torch.uint8, device="cpu")
            ranks.receive(head, source).wait()
            body = torch.empty(int.from_bytes(bytes_of(head)), dtype=torch.uint8, device="cpu")
            ranks.receive(body, source).wait()
            found[source] = Claims(tensors=(), rows={}).with_boxes(bytes(bytes_of(body))).rows
        # The sends end last, because both ranks may send before they receive.
        for each in sending:
            each.wait()
    return found


def exchange_counts(
    ranks: Ranks, outgoing: Mapping[int, Sequence[int]], incoming: Mapping[int, int]
) -> dict[int, list[int]]:
    """Send an integer for each piece to its taker; return those that this rank receives, by giver.

    Args:
        ranks: The ranks, of which each taker has sent a request to its givers.
        outgoing: Integers to send, by taker.
        incoming: Number of integers that arrive, by giver.
    """
    # The request has connected the two ranks, so no order of messages can make ranks wait in a circle.
    arriving = {giver: torch.empty(count, dtype=torch.int32, device="cpu") for giver, count in incoming.items()}
    transfers = [ranks.receive(each.view(torch.uint8), giver) for giver, each in arriving.items()]
    for taker, numbers in outgoing.items():
        leaving = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        transfers.append(ranks.send(leaving.view(torch.uint8), taker))
    for each in transfers:
        each.wait()
    return {giver: each.tolist() for giver, each in arriving.items()}
