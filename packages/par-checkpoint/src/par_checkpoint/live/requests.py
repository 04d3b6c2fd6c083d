"""Messages about pieces between takers and givers, straight from rank to rank."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from par_groups import Claims, bytes_of

from ..transfer.ranks import PeerTransfer, Ranks

Rows = dict[int, torch.Tensor]

_HEAD = 8  # bytes in front of a request, with its length
_FIRST = 2048  # bytes of the first message, which has the length and all of a usual request
_BITS = 62  # bits of an integer that ranks add up as one of 64 bits


def count_of_words(ranks: Ranks) -> int:
    """Return the number of integers of `words_of_givers`."""
    return ranks.size * _width(ranks)


def words_of_givers(givers: Iterable[int], ranks: Ranks) -> list[int]:
    """Return integers whose sums over all ranks contain one bit for each pair of a taker and its giver.

    Args:
        givers: Ranks to which this rank will send a request.
        ranks: The ranks.
    """
    mine, width = [0] * count_of_words(ranks), _width(ranks)
    for giver in givers:
        # Each rank sets bits in integers of its own, so no sum carries from one bit to the next.
        mine[ranks.rank * width + giver // _BITS] |= 1 << giver % _BITS
    return mine


def takers_of(sums: Sequence[int], ranks: Ranks) -> list[int]:
    """Return the ranks that will send a request to this rank.

    Args:
        sums: Sums of `words_of_givers` over all ranks.
        ranks: The ranks.
    """
    word, bit = divmod(ranks.rank, _BITS)
    return [taker for taker, mask in enumerate(sums[word :: _width(ranks)]) if mask >> bit & 1]


def _width(ranks: Ranks) -> int:
    """Return the number of integers that have a bit for each rank."""
    return -(-ranks.size // _BITS)


def exchange_requests(ranks: Ranks, requests: Mapping[int, Rows], takers: Collection[int]) -> dict[int, Rows]:
    """Send a request to each giver; return the rows of the requests that this rank receives, by taker.

    Args:
        ranks: The ranks.
        requests: Rows by giver: see `Claims.rows`.
        takers: Ranks that send a request to this rank.
    """
    # In step s, rank r sends to r + s and receives from r - s, so that no two steps wait for each other in a circle
    # while ranks connect. All messages are under way at the same time.
    steps = {(giver - ranks.rank) % ranks.size for giver in requests}
    steps |= {(ranks.rank - taker) % ranks.size for taker in takers}
    under_way, arriving, parts = list[PeerTransfer](), dict[int, PeerTransfer](), dict[int, list[torch.Tensor]]()
    for step in sorted(steps):
        to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        if to in requests:
            data = Claims(tensors=(), rows=requests[to]).boxes()
            framed = len(data).to_bytes(_HEAD) + data
            message = torch.frombuffer(bytearray(framed.ljust(_FIRST, b"\0")), dtype=torch.uint8)
            under_way += [ranks.send(part, to) for part in message.split([_FIRST, len(message) - _FIRST]) if len(part)]
        if source in takers:
            first = torch.empty(_FIRST, dtype=torch.uint8, device="cpu")
            arriving[source], parts[source] = ranks.receive(first, source), [first]
    for source, transfer in arriving.items():
        transfer.wait()
        rest = _HEAD + _length(parts[source][0]) - _FIRST
        if rest > 0:
            parts[source].append(torch.empty(rest, dtype=torch.uint8, device="cpu"))
            under_way.append(ranks.receive(parts[source][1], source))
    for transfer in under_way:
        transfer.wait()
    rows = {}
    for source, received in parts.items():
        data = b"".join(map(bytes_of, received))[_HEAD : _HEAD + _length(received[0])]
        rows[source] = Claims(tensors=(), rows={}).with_boxes(data).rows
    return rows


def _length(first: torch.Tensor) -> int:
    """Return the bytes of a request from its first message."""
    return int.from_bytes(bytes_of(first)[:_HEAD])


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
