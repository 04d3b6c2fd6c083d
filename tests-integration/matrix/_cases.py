"""The cells of the matrix: every configuration in every precision, and the cover of them that runs by default."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from par_pipeline import schedule

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-amp", "fp16-amp")
SCHEDULES = (
    *("gpipe", "1f1b", "zb_h1", "zb_h2"),
    *("interleaved", "looped_bfs", "zb_v", "v_half", "v_min", "dualpipe_v"),  # two stages on each rank
)
TENSOR: dict[str, dict[str, Any]] = {
    "TP2": {"size": 2, "mode": "1d"},
    "SP2": {"size": 2, "mode": "1d", "sequence_parallel": True},
    "TP4": {"size": 4, "mode": "1d"},
    "SP4": {"size": 4, "mode": "1d", "sequence_parallel": True},
    "2D4": {"size": 4, "mode": "2d"},
    "2.5D8": {"size": 8, "mode": "2.5d", "depth": 2},
    "3D8": {"size": 8, "mode": "3d"},
}
SEQUENCE: dict[str, dict[str, Any]] = {
    "Gather2": {"size": 2, "mode": "gather"},
    "Gather4": {"size": 4, "mode": "gather"},
    "Ring2": {"size": 2, "mode": "ring"},
    "Ulysses2": {"size": 2, "mode": "ulysses"},
    "Ulysses2 x Ring2": {"size": 4, "mode": "2d"},
    "Ulysses2 x Gather2": {"size": 4, "mode": "2d", "outer": "gather"},
}
EXPERT: dict[str, Any] = {
    "EP2": 2,
    "EP4": 4,
    "EP2 folded": {"size": 2, "tensor": 1},
    "EP4 folded": {"size": 4, "tensor": 1},
}
MICROBATCHES = 4
BUCKET = 20_000  # bytes: some chunks on each rank
BUDGET = {"device": "4MB", "host": "100kB", "disk": "20MB", "path": "/var/tmp"}
"""Of each rank: the host is full soon, so that most state lies on a disk."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration.

    Args:
        name: Such as "DP2 x PP2 x SP2, 1f1b, ZeRO 2, tied".
        ranks: Of the world.
        options: Of the strategy, but for precision.
        tied: Whether the logits share the embedding's table.
        model: "GPT", of the strategy's layers; "Llama" and "Qwen3", of transformers, as they are; "Packed", the GPT of
            `par-train run` on rows of documents; or "Mixture", the GPT with a mixture of experts after each block.
        muon: Whether matrices are stepped as wholes.
    """

    name: str
    ranks: int
    options: dict[str, Any] = field(hash=False)
    tied: bool = False
    model: str = "GPT"
    muon: bool = False


Cell = tuple[Case, str]
"""A configuration in a precision."""


def case(
    data: int = 1,
    pipeline: str | None = None,
    tensor: str | None = None,
    *,
    sequence: str | None = None,
    expert: str | None = None,
    zero: int = 0,
    tied: bool = False,
    model: str = "GPT",
    muon: bool = False,
    recompute: str | None = None,
    memory: bool = False,
) -> Case:
    """One configuration.

    Args:
        data: Data ranks.
        pipeline: The schedule of a pipeline of two ranks; None without.
        tensor: A name in `TENSOR`; None without.
        sequence: A name in `SEQUENCE`; None without.
        expert: A name in `EXPERT`; None without.
        zero: The ZeRO stage.
        tied: Whether the logits share the embedding's table.
        model: What is trained.
        muon: Whether matrices are stepped as wholes.
        recompute: What is computed again in backward.
        memory: Whether there is a budget, within which state lies on the host and on a disk, and layers run again.
    """
    mode, ranks = TENSOR.get(tensor or "", {}), 1 if pipeline is None else 2
    cut = SEQUENCE.get(sequence or "", {})
    axes = [f"DP{data}" if data > 1 else "", "PP2" if pipeline else "", sequence or "", expert or "", tensor or ""]
    further = [pipeline or "", f"ZeRO {zero}" if zero else "", "tied" if tied else "", "Muon" if muon else ""]
    further += [f"{recompute} again" if recompute else "", "memory" if memory else ""]
    declared = {"atomic": is_of_matrices, "elementwise": is_of_others}
    options: dict[str, Any] = {
        "parallel": {
            "data": data,
            "pipeline": ranks,
            **({"sequence": cut} if sequence else {}),
            **({"expert": EXPERT[expert]} if expert else {}),
            **({"tensor": mode} if tensor else {}),
        },
        "zero": {"stage": zero, "overlap": {"bucket": BUCKET}, "update": declared if muon else {}},
        "pipeline": {"schedule": pipeline, "microbatches": MICROBATCHES} if pipeline else {},
        "recompute": recompute,
        "memory": BUDGET if memory else None,
    }
    first = [model if model != "GPT" else "", " x ".join(filter(None, axes)) or "one rank"]
    name = ", ".join(filter(None, [*first, *further]))
    spread = EXPERT.get(expert or "", 1)
    inner = mode.get("size", 1) * cut.get("size", 1)  # ranks over which folded experts lie first
    own = max(1, spread["size"] // inner) if isinstance(spread, dict) else spread
    return Case(name=name, ranks=data * ranks * inner * own, options=options, tied=tied, model=model, muon=muon)


def is_of_matrices(group: dict[str, Any]) -> bool:
    """Whether the parameters of a group are stepped as whole matrices."""
    return bool(group["matrices"])


def is_of_others(group: dict[str, Any]) -> bool:
    """Whether the parameters of a group are stepped element by element."""
    return not group["matrices"]


def every_cell() -> list[Cell]:
    """All of them, in the order of the table.

    Under autocast, weights and gradients stay in fp32: what par-zero moves is the same, and is not tried again. Whole
    matrices are stepped in fp32 alone, where a wrong one shows best, and so are mixtures: which experts are chosen is
    no number that rounds a little.
    """
    plain = [case(), case(2), *(case(tensor=name) for name in TENSOR if name not in ("TP4", "SP4"))]
    plain += [case(pipeline=name) for name in SCHEDULES] + [case(pipeline="1f1b", tied=True)]
    plain += [case(data, "1f1b", tensor) for data in (1, 2) for tensor in ("TP2", "SP2")]
    plain += [case(2, name, "SP2", zero=2, tied=True) for name in ("1f1b", "zb_v")]
    plain += [case(sequence=name) for name in SEQUENCE if name != "Gather4"]
    plain += [case(pipeline="1f1b", sequence="Gather2", tied=True), case(2, "zb_v", sequence="Ring2")]
    zero = [case(2, zero=stage) for stage in (1, 2, 3)]
    zero += [case(2, tensor=tensor, zero=stage) for tensor in ("TP2", "SP2", "2D4") for stage in (1, 2, 3)]
    zero += [case(2, name, zero=stage) for name in SCHEDULES for stage in zero_stages(name)]
    zero += [case(2, "1f1b", "TP2", zero=stage) for stage in (1, 2, 3)]
    zero += [case(2, sequence="Gather2", zero=stage) for stage in (1, 2, 3)]
    both = [case(tensor=tensor, sequence="Gather2") for tensor in ("TP2", "SP2")]
    both += [case(2, tensor="SP2", sequence="Gather2", zero=stage) for stage in (1, 3)]
    packed = [case(model="Packed"), *(case(sequence=name, model="Packed") for name in SEQUENCE if name != "Gather4")]
    packed += [
        case(2, sequence="Ring2", zero=3, model="Packed"),
        case(2, sequence="Ulysses2 x Ring2", zero=2, model="Packed"),
        case(tensor="SP2", sequence="Gather2", model="Packed"),
    ]
    packed += [case(pipeline="1f1b", sequence="Gather2", tied=True, model="Packed")]
    packed += [case(2, "zb_v", sequence="Ulysses2", zero=2, model="Packed"), case(tensor="2D4", model="Packed")]
    existing = [case(pipeline=pipeline, tensor="SP2", model="Llama") for pipeline in (None, "1f1b")]
    existing += [case(sequence=name, model="Llama") for name in SEQUENCE if name != "Gather4"]
    sharded = [case(2, tensor="TP2", zero=2, model="Llama"), case(2, "1f1b", zero=1, tied=True, model="Llama")]
    sharded += [
        case(2, sequence="Gather2", zero=3, model="Llama"),
        case(pipeline="1f1b", sequence="Ring2", model="Llama"),
    ]
    matrices = [case(2, zero=3, muon=True), case(2, tensor="SP2", zero=2, muon=True), case(tensor="2D4", muon=True)]
    again = [case(2, zero=3, recompute="layers"), case(tensor="SP2", recompute="cheap")]
    again += [case(2, "1f1b", "TP2", zero=1, recompute="layers:2"), case(pipeline="zb_v", recompute="keep:0.5")]
    again += [case(sequence="Ring2", recompute="layers"), case(2, sequence="Gather2", zero=3, recompute="keep:0.5")]
    again += [case(pipeline="1f1b", tensor="SP2", model="Llama", recompute="layers")]
    mixtures = [case(expert="EP2", zero=stage, model="Mixture") for stage in range(4)]
    mixtures += [case(2, expert="EP2", zero=3, model="Mixture"), case(pipeline="1f1b", expert="EP2", model="Mixture")]
    mixtures += [case(tensor="TP2", expert="EP2 folded", zero=stage, model="Mixture") for stage in (0, 3)]
    mixtures += [case(tensor="SP2", expert=name, zero=1, model="Mixture") for name in ("EP2", "EP4 folded")]
    mixtures += [case(sequence="Ring2", expert="EP2 folded", model="Mixture")]
    mixtures += [case(2, "zb_v", "TP2", expert="EP2 folded", zero=2, model="Mixture")]
    mixtures += [case(expert="EP2", zero=stage, model="Mixture", memory=True) for stage in range(4)]
    mixtures += [case(2, expert="EP2", zero=3, model="Mixture", memory=True)]
    mixtures += [case(tensor="TP2", expert="EP2 folded", zero=1, model="Mixture", memory=True)]
    mixtures += [case(pipeline="1f1b", expert="EP2", zero=2, model="Mixture", memory=True)]
    return [
        *_in(plain, PRECISIONS),
        *_in(zero, ("fp32", "bf16", "fp16")),
        *_in(both, ("fp32", "bf16", "fp16")),
        *_in(packed, ("fp32", "bf16", "fp16")),
        *_in(existing, PRECISIONS),
        *_in(sharded, ("fp32", "bf16", "fp16")),
        *_in(matrices, ("fp32",)),
        *_in(mixtures, ("fp32",)),
        *_in(again, ("fp32", "bf16", "fp16")),
    ]


def cover() -> list[Cell]:
    """Every axis and ZeRO stage, tensor modes and schedules of each kind in fp32, and every precision somewhere.

    2.5d and 3d, and data ranks of pipelines of cut layers, are followed where a run of eight ranks goes on from one to
    the other, the schedules that are not here where the trainer goes through them all, whole matrices where a
    strategy steps them.
    """
    fp32 = [case(2, zero=3), case(tensor="SP2"), case(pipeline="looped_bfs")]
    fp32 += [case(sequence="Ring2"), case(tensor="SP2", sequence="Gather2", zero=1)]
    fp32 += [case(pipeline="1f1b", tensor="SP2", model="Llama"), case(2, sequence="Gather2", zero=2, model="Packed")]
    fp32 += [
        case(expert="EP2", zero=3, model="Mixture", memory=True),
        case(tensor="TP2", expert="EP2 folded", model="Mixture"),
    ]
    return [
        *_in(fp32, ("fp32",)),
        (case(2, zero=2), "bf16"),
        (case(sequence="Gather2", zero=3), "bf16"),
        (case(2, "interleaved", zero=3), "bf16"),
        (case(2, "1f1b", zero=1), "fp16"),
        (case(tensor="2D4"), "bf16-amp"),
        (case(pipeline="zb_v"), "fp16-amp"),
        (case(tensor="SP2", recompute="cheap"), "bf16-amp"),
    ]


def zero_stages(pipeline: str) -> range:
    """Stage 3 frees weights after a backward, so it does not go with schedules that take weight gradients later."""
    later = any(action.op == "W" for action in schedule(pipeline, 2, MICROBATCHES).ranks[0])
    return range(1, 3 if later else 4)


def _in(cases: Iterable[Case], precisions: Iterable[str]) -> list[Cell]:
    return [(each, precision) for each in cases for precision in precisions]
