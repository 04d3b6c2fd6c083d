"""Draws how a sequence is cut over ranks, what each fetches, and the pieces it computes. `docs/figures.py` calls it."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from par_layers import Mask, Tokens, attention_pairs
from par_layers.context.balance import cut_tokens
from par_layers.context.fetch import Fetch, transfers
from par_layers.context.pieces import pieces

RANKS, LENGTH = 4, 8192
DOCUMENTS = (900, 3400, 300, 1500, 150, 1942)
CAUSAL = Mask(causal=True)
OWN, FETCHED, REST, EDGE = "#1f5fa8", "#9cc3e8", "#eeeeee", "#444444"
KINDS = {"full": "#1f5fa8", "causal": "#5a9bd4", "anti": "#e0a030", "band": "#c8503c"}

PACKED = (900, 1500, 1696)

MASKS = {
    "causal, one document": (Mask(causal=True), (4096,)),
    "causal, packed": (Mask(causal=True), PACKED),
    "window of 1024": (Mask(causal=True, window=1024), (4096,)),
    "prefix of 600, packed": (Mask(causal=True, prefix=600), PACKED),
}


def draw_sequences(images: Path) -> None:
    """Two pictures: what each rank holds and fetches under each cut, and the pieces of masks."""
    draw_cuts(images / "context-cuts.svg")
    draw_pieces(images / "context-pieces.svg")


def draw_cuts(path: Path) -> None:
    """A packed row under each cut: for each rank the tokens that it has and fetches, and its work."""
    cuts = {
        "contiguous": cut_tokens(LENGTH, RANKS, "contiguous", documents=DOCUMENTS),
        "zigzag": cut_tokens(LENGTH, RANKS, "zigzag", documents=DOCUMENTS),
        "balanced": cut_tokens(LENGTH, RANKS, "balanced", documents=DOCUMENTS, chunks=4),
    }
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    panels = figure.subplots(len(cuts), 2, width_ratios=(3.2, 1), sharex="col", squeeze=False)
    for (title, tokens), (row, bars) in zip(cuts.items(), panels, strict=True):
        pairs = np.array([attention_pairs(CAUSAL, tokens, rank) for rank in range(RANKS)])
        fetched = draw_ranks(row, tokens)
        row.set_title(f"{title}: a rank fetches up to {max(fetched) / LENGTH:.0%} of the row", loc="left", fontsize=9)
        load = pairs / pairs.mean()
        drawn = bars.barh(range(RANKS), load, color=OWN, height=0.7)
        bars.bar_label(drawn, [f"{each:.2f}" for each in load], padding=2, fontsize=8)
        bars.axvline(1, color=EDGE, lw=0.8, ls="--")
        bars.set_title("work, over the mean", loc="left", fontsize=9)
        bars.set_xlim(0, 2.4)
        bars.set_yticks([])
        bars.invert_yaxis()
        bars.tick_params(labelsize=8)
    panels[-1, 0].set_xlabel("token of the row; lines are where documents begin", fontsize=8)
    handles = [mpl.patches.Patch(color=colour) for colour in (OWN, FETCHED, REST)]
    figure.legend(handles, ["has", "fetches", "does not need"], loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path)


def draw_ranks(axes: Axes, tokens: Tokens) -> list[int]:
    """A line for each rank; how many tokens each fetches."""
    table = transfers(*CAUSAL.intervals(tokens), tokens)
    numbers = []
    for rank in range(tokens.ranks):
        fetched = Fetch(table, rank).keys[0]
        numbers.append(sum(stop - start for start, stop in fetched))
        axes.broken_barh([(0, tokens.padded)], (rank - 0.35, 0.7), color=REST)
        for runs, colour in ((tokens.runs[rank], OWN), (fetched, FETCHED)):
            axes.broken_barh([(start, stop - start) for start, stop in runs], (rank - 0.35, 0.7), color=colour)
    for place in np.cumsum(tokens.documents[0])[:-1]:
        axes.axvline(place, color=EDGE, lw=0.8)
    axes.set_yticks(range(tokens.ranks), [f"rank {rank}" for rank in range(tokens.ranks)])
    axes.set_xlim(0, tokens.padded)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    return numbers


def draw_pieces(path: Path) -> None:
    """The pieces that one device computes of some masks; on several ranks each has those of its queries."""
    figure = Figure(figsize=(9.5, 3), layout="constrained")
    panels = figure.subplots(1, len(MASKS), sharey=True, squeeze=False)[0]
    for axes, (title, (mask, documents)) in zip(panels, MASKS.items(), strict=True):
        tokens = cut_tokens(sum(documents), 1, documents=documents)
        first, last = mask.intervals(tokens)
        for q0, q1, k0, k1, kind, *_ in pieces(first[0], last[0], tokens.runs[0], tokens.runs[0]):
            corners = {
                "causal": [(k0, q0), (k1, q1), (k0, q1)],
                "anti": [(k0, q0), (k1, q0), (k1, q1)],
            }.get(kind, [(k0, q0), (k1, q0), (k1, q1), (k0, q1)])
            axes.add_patch(mpl.patches.Polygon(corners, fc=KINDS[kind], ec="white", lw=0.6))
        axes.set_xlim(0, tokens.padded)
        axes.set_ylim(tokens.padded, 0)
        axes.set_aspect("equal")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("keys", fontsize=8)
        axes.tick_params(labelsize=7)
    panels[0].set_ylabel("queries", fontsize=8)
    handles = [mpl.patches.Patch(color=KINDS[kind]) for kind in ("full", "causal", "anti")]
    figure.legend(handles, ["full", "causal", "anti-causal"], loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path)
