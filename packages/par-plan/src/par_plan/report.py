"""What the planner has found, in words: a table, why the first is first, and what is wrong with the configured one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from par_groups import format_bytes, format_seconds

from .budget.tiers import AWAY, TierFractions
from .costs.sequence import sequence_split
from .costs.traffic import over
from .experts.spread import expert_config
from .inputs import Machine, TrainingJob
from .models.protocol import PlannedModel
from .prediction import MARGIN, Prediction, planned
from .search import LEAST_TOKENS, SearchResult
from .seconds import TERMS
from .shape import Shape, tensor_split

_TITLES = (
    "data",
    "pipeline",
    "sequence",
    "expert",
    "tensor",
    "zero",
    "schedule",
    "micro",
    "memory",
    "recompute",
    "away",
    "host",
    "disk",
    "binds",
    "traffic",
    "bubble",
    "step",
    "bound by",
)

_TERMS_IN_WORDS = {
    "compute": "arithmetic",
    "again": "what backward computes again",
    "tensor": "what tensor ranks send each other",
    "sequence": "what attention waits for over the sequence's ranks",
    "experts": "tokens on their way to experts and back",
    "pipeline": "what pipeline stages send each other",
    "bubble": "waiting in the pipeline",
    "data": "gradients and parameters that replicas exchange",
    "away": "what lies elsewhere",
}


_RECOMPUTE_IN_WORDS = {"cheap": "norms and activations are computed again", "layers": "layers are computed again"}


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Everything that `par-train plan` prints or writes.

    Args:
        shape: The model's sizes.
        world: Number of devices.
        job: Batch and precision of the training job.
        machine: The machine that is planned for.
        configured: The prediction for what the config says; None if it names no axes.
        ranking: What the search found.
    """

    shape: Shape | PlannedModel
    world: int
    job: TrainingJob
    machine: Machine
    configured: Prediction | None
    ranking: SearchResult

    def text(self) -> str:
        """The report for people: what was given, tables, and sentences."""
        machine, ranking = self.machine, self.ranking
        given = [
            f"model    {planned(self.shape).describe()}",
            f"job      batch {self.job.batch:,} windows, precision {self.job.precision}, AdamW",
            f"world    {self.world:,} device{'s' * (self.world > 1)} of {format_bytes(machine.memory)}, of which "
            f"{MARGIN:.0%} is left free, {machine.devices_per_node} a node; {ranking.frames:,} ways to divide it",
            f"machine  {machine.flops:.4g} FLOP/s x {machine.efficiency:g}; {format_bytes(machine.bandwidth)}/s within "
            f"a node, {format_bytes(machine.network)}/s between nodes; {machine.latency * 1e6:g} us an operation",
        ]
        model = planned(self.shape)
        for what, reason in (
            ("tensor", model.why_no_tensor_ranks()),
            ("stages", model.why_no_stages()),
            ("sequence", model.why_no_sequence_ranks() if model.context >= 2 * LEAST_TOKENS else None),
        ):
            if reason is not None:
                given.append(f"{what:8} none are planned: {reason}")
        parts = [given]
        if self.configured is not None:
            parts.append(["Configured", *table([self.configured], machine), *transfers(self.configured)])
        if ranking.best:
            best = ranking.best
            of_first = ["Of these the first", *sent] if (sent := transfers(best[0])) else []
            parts.append(["Best of each topology", *table(best, machine), *of_first])
        elif ranking.nearest is not None:
            nearest = ranking.nearest
            parts.append(["Nothing fits; this takes the least memory", *table([nearest], machine), *transfers(nearest)])
        return "\n\n".join("\n".join(lines) for lines in [*parts, self.reasons()])

    def reasons(self) -> list[str]:
        """Sentences: why the first is first, what the configured one lacks, and what to change if nothing fits."""
        mine, fits_not = self.configured, []
        if mine is not None and not mine.fits(self.machine):
            room = format_bytes((1 - MARGIN) * self.machine.memory)
            fits_not = [f"The configured one does not fit into {room}: it needs {_memory_in_words(mine)}."]
            if mine.memory.host or mine.memory.disk:
                fits_not += [_elsewhere_in_words(mine)]
        if not self.ranking.best:
            return [*fits_not, *self._remedies()]
        best, *others = self.ranking.best
        step, memory = format_seconds(best.seconds), format_bytes(best.memory.total)
        sentences = [f"{describe(best)} is fastest: {step} a step in {memory}.", *self._choices(best)]
        sentences.append(_where_time_goes(best))
        sentences += _where_rows_go(best, self.machine)
        if others:
            sentences.append(f"The next, {describe(others[0])}, {_behind(others[0], best)}")
        if mine is None or fits_not:
            return [*sentences, *fits_not, *([] if mine is None else _where_rows_go(mine, self.machine))]
        if mine.seconds <= best.seconds:
            return [*sentences, "The configured one is the best there is."]
        return [*sentences, f"The configured one {_behind(mine, best)}", *_where_rows_go(mine, self.machine)]

    def as_dict(self) -> dict[str, Any]:
        """The report for programs: plain values, in bytes and seconds."""
        return {
            "model": planned(self.shape).as_dict(),
            "world": self.world,
            "batch": self.job.batch,
            "machine": {name: value for name, value in vars(self.machine).items() if name != "gloo"},
            "margin": MARGIN,
            "configured": None if self.configured is None else as_dict(self.configured),
            "best": [as_dict(prediction) for prediction in self.ranking.best],
            "nearest": None if self.ranking.nearest is None else as_dict(self.ranking.nearest),
            "reasons": self.reasons(),
        }

    def _choices(self, made: Prediction) -> list[str]:
        """Why something is computed again, or lies elsewhere, and which tier binds."""
        job, machine = made.job, self.machine
        binds = made.binds(machine)
        if not binds:
            return []
        room = format_bytes((1 - MARGIN) * machine.memory)
        share, param = (
            f"{job.optimizer_offloaded:.0%} of the optimizer's state",
            f"{job.parameters_offloaded:.0%} of the parameters",
        )
        lies = " and ".join([share] * bool(job.optimizer_offloaded) + [param] * bool(job.parameters_offloaded))
        words = [
            f"{_RECOMPUTE_IN_WORDS[job.recompute]}, for {format_seconds(made.busiest.seconds['again'])}"
            if job.recompute
            else "",
            f"{lies} lie elsewhere ({offload_in_words(job)}), for {format_seconds(made.busiest.seconds['away'])}"
            if lies
            else "",
        ]
        chosen = " and ".join(word for word in words if word)
        sentences = [f"The device binds: to fit into {room}, {chosen}."]
        if made.memory.host or made.memory.disk:
            sentences.append(_elsewhere_in_words(made))
        if binds == "host":
            sentences.append("The host binds, too: what it has no room for lies on the disk.")
        return sentences

    def _remedies(self) -> list[str]:
        """What to change where nothing fits."""
        nearest, keys = self.ranking.nearest, planned(self.shape).keys
        if nearest is None:
            return [
                f"No configuration of {self.world:,} devices divides this model and a batch of {self.job.batch:,}: "
                f"change train.batch_size, {keys['heads']}, or the number of devices, to multiples of each other."
            ]
        needs = f"{describe(nearest)} comes nearest, with {_memory_in_words(nearest)}."
        short = self.ranking.short
        if short is not None and (self.machine.host_memory or self.machine.disk):
            needs += f" There {short}."
            if short.tier != "device":
                return [needs, f"The {short.tier} binds: take more of it, or more devices."]
        if nearest.memory.state > nearest.memory.total / 2:
            more = "" if self.machine.host_memory or self.machine.disk else ", say with --host-memory what the host has"
            remedy = f"take more devices{more}, or fewer {keys['layers']}"
            return [needs, f"Most are parameters and the optimizer's state: {remedy}."]
        return [needs, f"Most are activations: shorten {keys['context']}, or take more devices to cut them over."]


def table(predictions: Sequence[Prediction], machine: Machine | None = None) -> list[str]:
    """A line of titles, and one line for each prediction; columns align.

    There is a column for the axis `sequence` where one of them cuts it, for experts where one of them deals them out,
    for recomputation where one of them does some, and for host and disk where something lies there.

    Args:
        predictions: The lines.
        machine: The machine whose tiers bind, for the columns of tiers; None: without that one.
    """
    sequences = [sequence_split(prediction.topology) for prediction in predictions]
    is_cut = any(sequence.ranks > 1 for sequence in sequences)
    left_out = set() if is_cut else {"sequence"}
    again = any(prediction.job.recompute for prediction in predictions)
    away = any(prediction.job.optimizer_offloaded or prediction.job.parameters_offloaded for prediction in predictions)
    left_out |= set() if any(tensor_split(each.topology).experts.is_dealt for each in predictions) else {"expert"}
    left_out |= (set() if again else {"recompute"}) | (set() if away else {"away", "host", "disk"})
    left_out |= set() if (again or away) and machine is not None else {"binds"}
    lines = [tuple(title for title in _TITLES if title not in left_out)]
    for prediction, sequence in zip(predictions, sequences, strict=True):
        topology, job = prediction.topology, prediction.job
        cells = (
            str(topology.size("data")),
            str(topology.size("pipeline")),
            sequence.label,
            tensor_split(topology).experts.label,
            tensor_split(topology).label,
            str(job.zero),
            job.schedule if topology.size("pipeline") > 1 else "-",
            str(job.microbatches),
            format_bytes(prediction.memory.total),
            job.recompute or "-",
            offload_in_words(job),
            format_bytes(prediction.memory.host),
            format_bytes(prediction.memory.disk),
            (prediction.binds(machine) if machine is not None else "") or "-",
            format_bytes(sum(prediction.traffic.values())),
            f"{prediction.bubble:.1%}",
            format_seconds(prediction.seconds),
            prediction.bound,
        )
        lines.append(tuple(cell for title, cell in zip(_TITLES, cells, strict=True) if title not in left_out))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def transfers(prediction: Prediction) -> list[str]:
    """A line for each kind of traffic of the busiest rank in a step, and one for its experts."""
    lines = [
        f"  over {over(transfer, prediction.topology)}: {format_bytes(transfer.bytes)} of {transfer.what}, "
        f"{transfer.operations:,.0f} operation{'' if transfer.operations == 1 else 's'}"
        for transfer in prediction.busiest.transfers
    ]
    return [*lines, *_experts_in_words(prediction)]


def _experts_in_words(prediction: Prediction) -> list[str]:
    """What the experts of the busiest rank take, if it has any."""
    work = prediction.busiest.experts
    if work is None:
        return []
    reads = f", {work.host_syncs:,} times that the host waits for numbers of rows" if work.host_syncs else ""
    return [
        f"  experts x imbalance {work.imbalance:.3g}: {work.layers} layer{'s' * (work.layers > 1)} of "
        f"{work.flops / 1e12:.3g} TFLOP and {format_bytes(work.kept)} kept for a microbatch each{reads}"
    ]


def describe(prediction: Prediction) -> str:
    """A configuration in words, such as "data 2 x pipeline 2, zero 1, zb_h1, 4 microbatches"."""
    topology, job = prediction.topology, prediction.job
    axes = [f"{name} {topology.size(name)}" for name in ("data", "pipeline") if topology.size(name) > 1]
    sequence, split = sequence_split(topology), tensor_split(topology)
    if sequence.ranks > 1:
        axes.append(f"sequence {sequence.label}")
    if split.experts.is_dealt:
        axes.append(f"expert {split.experts.label}")
    if split.ranks > 1:
        axes.append(f"tensor {split.label}")
    words = [" x ".join(axes) or "one device", f"zero {job.zero}"]
    if topology.size("pipeline") > 1:
        words.append(job.schedule)
    if job.microbatches > 1:
        words.append(f"{job.microbatches} microbatches")
    if job.recompute:
        words.append(f"recompute {job.recompute}")
    if job.optimizer_offloaded or job.parameters_offloaded:
        words.append(offload_in_words(job))
    return ", ".join(words)


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """A prediction as plain values; `parallel`, `zero`, `precision` and `pipeline` as a config writes them."""
    topology, job, busiest = prediction.topology, prediction.job, prediction.busiest
    modes = {
        axis: {"size": topology.size(axis), "mode": mode, **options}
        for axis, (mode, options) in topology.modes.items()
        if topology.size(axis) > 1
    }
    return {
        "parallel": {
            "data": topology.size("data"),
            "pipeline": topology.size("pipeline"),
            **modes,
            **expert_config(topology),
        },
        "zero": job.zero,
        "precision": job.precision,
        "pipeline": {"schedule": job.schedule, "microbatches": job.microbatches},
        "recompute": job.recompute,
        **job.parts,
        "memory": {**vars(prediction.memory), "total": prediction.memory.total},
        "traffic": [vars(transfer) for transfer in busiest.transfers],
        **({} if busiest.experts is None else {"experts": vars(busiest.experts)}),
        "bubble": prediction.bubble,
        "seconds": {**busiest.seconds, "total": prediction.seconds},
        "bound": prediction.bound,
    }


def offload_in_words(job: TrainingJob) -> str:
    """What lies elsewhere, such as "opt 60% host, param 20% host"; "-" if nothing does."""
    return TierFractions(parts=job.parts).describe()


def _elsewhere_in_words(prediction: Prediction) -> str:
    tiers = [(format_bytes(getattr(prediction.memory, tier)), tier) for tier in AWAY]
    return f"Of each device {' and '.join(f'{size} lie on the {tier}' for size, tier in tiers if size != '0 B')}."


def _where_time_goes(prediction: Prediction) -> str:
    seconds, total = prediction.busiest.seconds, prediction.seconds
    shares = ", ".join(f"{term} {seconds[term] / total:.1%}" for term in TERMS if seconds[term] >= 5e-4 * total)
    sentences = f"Its time is {shares}. The limit is {_TERMS_IN_WORDS[prediction.bound]}"
    most = max((term for term in TERMS if term != "compute"), key=lambda term: seconds[term])
    if seconds[most] > 0 and most != prediction.bound:
        sentences += f"; beside computing, most goes to {_TERMS_IN_WORDS[most]}"
    return f"{sentences}."


def _where_rows_go(prediction: Prediction, machine: Machine) -> list[str]:
    """Why experts lie as they do: over what rows travel, and for how long beside arithmetic."""
    topology, seconds = prediction.topology, prediction.busiest.seconds
    spread = tensor_split(topology).experts
    if spread.parallel == 1 or prediction.busiest.experts is None:
        return []
    nodes = max(
        -(-block.size * block.stride // machine.devices_per_node) for block in topology.blocks("expert_parallel")
    )
    rows, rate = format_seconds(seconds["experts"]), machine.bandwidth if nodes == 1 else machine.network
    place = "one node" if nodes == 1 else f"{nodes} nodes"
    sentence = (
        f"Experts are dealt out over {spread.parallel} ranks of {place}, where rows travel at {format_bytes(rate)}/s: "
        f"{rows} beside {format_seconds(seconds['compute'])} of arithmetic"
    )
    if nodes > 1 and seconds["experts"] > seconds["compute"] / 2:
        sentence += "; deal them out over fewer nodes, or compute something else while they travel"
    return [f"{sentence}."]


def _behind(prediction: Prediction, best: Prediction) -> str:
    """By how much a configuration is slower than the best, and which term of its time adds most."""
    mine, its = prediction.busiest.seconds, best.busiest.seconds
    most = max(TERMS, key=lambda term: mine[term] - its[term])
    if mine[most] <= its[most]:
        return "takes as long."
    longer, more = prediction.seconds / best.seconds - 1, format_seconds(mine[most] - its[most])
    return f"takes {longer:.1%} longer: {more} more for {_TERMS_IN_WORDS[most]}."


def _memory_in_words(prediction: Prediction) -> str:
    memory = prediction.memory
    kinds = ["parameters", "gradients", "optimizer", "buffers", "activations"]
    kinds += [kind for kind in ("logits", "attention") if getattr(memory, kind)]
    parts = ", ".join(f"{format_bytes(getattr(memory, kind))} {kind}" for kind in kinds)
    return f"{format_bytes(memory.total)} ({parts})"
