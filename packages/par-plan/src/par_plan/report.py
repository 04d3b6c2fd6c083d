"""The report of a search as text and as plain values: tables, and sentences that explain the choice."""

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
    "offload",
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
    "recompute": "recomputation",
    "tensor": "tensor-parallel communication",
    "sequence": "context-parallel communication",
    "experts": "expert-parallel communication",
    "pipeline": "messages between pipeline stages",
    "bubble": "the pipeline bubble",
    "data": "gradient and parameter communication",
    "offload": "offloaded state",
}


_RECOMPUTE_IN_WORDS = {"cheap": "norms and activation functions are recomputed", "layers": "layers are recomputed"}


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The result of a search, for printing and for JSON.

    Args:
        shape: The model's sizes.
        world: Number of devices.
        job: Batch and precision of the training job.
        machine: Devices, network and memory tiers of the plan.
        configured: The prediction for the user's own configuration; None if the user has no configuration.
        ranking: The result of the search.
    """

    shape: Shape | PlannedModel
    world: int
    job: TrainingJob
    machine: Machine
    configured: Prediction | None
    ranking: SearchResult

    def text(self) -> str:
        """Return the report as text: inputs, tables, and sentences that explain the choice."""
        machine, ranking = self.machine, self.ranking
        given = [
            f"model    {planned(self.shape).describe()}",
            f"job      batch {self.job.batch:,} sequences, precision {self.job.precision}, AdamW",
            f"world    {self.world:,} device{'s' * (self.world > 1)} of {format_bytes(machine.memory)}, "
            f"{MARGIN:.0%} reserved, {machine.devices_per_node} per node; {ranking.frames:,} topologies x microbatches",
            f"machine  {machine.flops:.4g} FLOP/s x {machine.efficiency:g}; {format_bytes(machine.bandwidth)}/s within "
            f"a node, {format_bytes(machine.network)}/s between nodes; {machine.latency * 1e6:g} us per operation",
        ]
        model = planned(self.shape)
        for what, reason in (
            ("tensor", model.why_no_tensor_ranks()),
            ("stages", model.why_no_stages()),
            ("sequence", model.why_no_sequence_ranks() if model.context >= 2 * LEAST_TOKENS else None),
        ):
            if reason is not None:
                given.append(f"{what:8} not planned: {reason}")
        parts = [given]
        if self.configured is not None:
            parts.append(["Your configuration", *table([self.configured], machine), *transfers(self.configured)])
        if ranking.best:
            best = ranking.best
            of_first = ["Traffic of the first", *sent] if (sent := transfers(best[0])) else []
            parts.append(["Best configuration of each topology", *table(best, machine), *of_first])
        elif ranking.nearest is not None:
            nearest = ranking.nearest
            parts.append(
                [
                    "Nothing fits; this configuration needs the least memory",
                    *table([nearest], machine),
                    *transfers(nearest),
                ]
            )
        return "\n\n".join("\n".join(lines) for lines in [*parts, self.reasons()])

    def reasons(self) -> list[str]:
        """Return sentences that explain the fastest configuration and the user's own, or remedies."""
        mine, fits_not = self.configured, []
        if mine is not None and not mine.fits(self.machine):
            room = format_bytes((1 - MARGIN) * self.machine.memory)
            fits_not = [f"Your configuration does not fit in {room}: it needs {_memory_in_words(mine)}."]
            if mine.memory.host or mine.memory.disk:
                fits_not += [_elsewhere_in_words(mine)]
        if not self.ranking.best:
            return [*fits_not, *self._remedies()]
        best, *others = self.ranking.best
        step, memory = format_seconds(best.seconds), format_bytes(best.memory.total)
        sentences = [f"{describe(best)} is the fastest: {step} per step in {memory}.", *self._choices(best)]
        sentences.append(_where_time_goes(best))
        sentences += _where_rows_go(best, self.machine)
        if others:
            sentences.append(f"The second, {describe(others[0])}, {_behind(others[0], best)}")
        # A configuration that does not fit has no meaningful step time, so it is not compared with the fastest one.
        if mine is None or fits_not:
            return [*sentences, *fits_not, *([] if mine is None else _where_rows_go(mine, self.machine))]
        if mine.seconds <= best.seconds:
            return [*sentences, "Your configuration is the fastest."]
        return [*sentences, f"Your configuration {_behind(mine, best)}", *_where_rows_go(mine, self.machine)]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, in bytes and seconds."""
        return {
            "model": planned(self.shape).as_dict(),
            "world": self.world,
            "batch": self.job.batch,
            "machine": {
                **{name: value for name, value in vars(self.machine).items() if name not in ("gloo", "tiers")},
                **vars(self.machine.tiers),
            },
            "margin": MARGIN,
            "configured": None if self.configured is None else as_dict(self.configured),
            "best": [as_dict(prediction) for prediction in self.ranking.best],
            "nearest": None if self.ranking.nearest is None else as_dict(self.ranking.nearest),
            "reasons": self.reasons(),
        }

    def _choices(self, made: Prediction) -> list[str]:
        """Return why layers are recomputed or state is offloaded, and which tier is the limit."""
        job, machine = made.job, self.machine
        binds = made.binds(machine)
        if not binds:
            return []
        room = format_bytes((1 - MARGIN) * machine.memory)
        share, param = (
            f"{job.optimizer_offloaded:.0%} of the optimizer's state",
            f"{job.parameters_offloaded:.0%} of the parameters",
        )
        offloaded = " and ".join([share] * bool(job.optimizer_offloaded) + [param] * bool(job.parameters_offloaded))
        words = [
            f"{_RECOMPUTE_IN_WORDS[job.recompute]}, for {format_seconds(made.busiest.seconds['recompute'])}"
            if job.recompute
            else "",
            f"{offloaded} are offloaded ({offload_in_words(job)}), for "
            f"{format_seconds(made.busiest.seconds['offload'])}"
            if offloaded
            else "",
        ]
        chosen = " and ".join(word for word in words if word)
        sentences = [f"Device memory is the limit: to fit in {room}, {chosen}."]
        if made.memory.host or made.memory.disk:
            sentences.append(_elsewhere_in_words(made))
        if binds == "host":
            sentences.append("Host memory is a limit, too: the rest goes to the disk.")
        return sentences

    def _remedies(self) -> list[str]:
        """Return what to change if nothing fits."""
        nearest, keys = self.ranking.nearest, planned(self.shape).keys
        if nearest is None:
            return [
                f"No configuration of {self.world:,} devices divides this model and a batch of {self.job.batch:,}: "
                f"change train.batch_size, {keys['heads']}, or the number of devices, to multiples of each other."
            ]
        needs = f"{describe(nearest)} needs the least: {_memory_in_words(nearest)}."
        short = self.ranking.short
        if short is not None and (self.machine.tiers):
            needs += f" In that configuration, {short}."
            if short.tier != "device":
                return [needs, f"The {short.tier} is the limit: add capacity there, or add devices."]
        # The remedy depends on what takes most: state shrinks with more ranks, activations also with a shorter context.
        if nearest.memory.state > nearest.memory.total / 2:
            more = "" if self.machine.tiers else ", pass --host-memory to offload"
            remedy = f"add devices{more}, or reduce {keys['layers']}"
            return [needs, f"Most of it is parameters and optimizer state: {remedy}."]
        return [needs, f"Most of it is activations: reduce {keys['context']}, or add devices that shard them."]


def table(predictions: Sequence[Prediction], machine: Machine | None = None) -> list[str]:
    """Return a line of titles, and one line for each prediction; columns align.

    Columns for sequence ranks, expert ranks, recomputation and offloading appear only if a prediction uses them.

    Args:
        predictions: The configurations to print, one per line.
        machine: The machine whose memory tier limits each configuration; None omits the column "binds".
    """
    sequences = [sequence_split(prediction.topology) for prediction in predictions]
    is_cut = any(sequence.ranks > 1 for sequence in sequences)
    left_out = set() if is_cut else {"sequence"}
    again = any(prediction.job.recompute for prediction in predictions)
    away = any(prediction.job.optimizer_offloaded or prediction.job.parameters_offloaded for prediction in predictions)
    left_out |= set() if any(tensor_split(each.topology).experts.is_dealt for each in predictions) else {"expert"}
    left_out |= (set() if again else {"recompute"}) | (set() if away else {"offload", "host", "disk"})
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
    """Return a line for each kind of traffic of the busiest rank in a step, and a line for its experts."""
    lines = [
        f"  over {over(transfer, prediction.topology)}: {format_bytes(transfer.bytes)} of {transfer.what}, "
        f"{transfer.operations:,.0f} operation{'' if transfer.operations == 1 else 's'}"
        for transfer in prediction.busiest.transfers
    ]
    return [*lines, *_experts_in_words(prediction)]


def _experts_in_words(prediction: Prediction) -> list[str]:
    """Return the cost of the busiest rank's experts as text; nothing without experts."""
    work = prediction.busiest.experts
    if work is None:
        return []
    reads = f"; {work.host_syncs:,} host syncs for token counts" if work.host_syncs else ""
    return [
        f"  experts x imbalance {work.imbalance:.3g}: {work.layers} layer{'s' * (work.layers > 1)}, each "
        f"{work.flops / 1e12:.3g} TFLOP and {format_bytes(work.kept)} saved per microbatch{reads}"
    ]


def describe(prediction: Prediction) -> str:
    """Return a configuration as text, such as "data 2 x pipeline 2, zero 1, zb_h1, 4 microbatches"."""
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
    """Return a prediction as plain values; a config accepts `parallel`, `zero`, `precision` and `pipeline`."""
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
    """Return the offloaded fractions as text, such as "opt 60% host, param 20% host"; "-" if nothing is offloaded."""
    return TierFractions(parts=job.parts).describe()


def _elsewhere_in_words(prediction: Prediction) -> str:
    tiers = [(format_bytes(getattr(prediction.memory, tier)), tier) for tier in AWAY]
    return f"Each device offloads {' and '.join(f'{size} to the {tier}' for size, tier in tiers if size != '0 B')}."


def _where_time_goes(prediction: Prediction) -> str:
    seconds, total = prediction.busiest.seconds, prediction.seconds
    shares = ", ".join(f"{term} {seconds[term] / total:.1%}" for term in TERMS if seconds[term] >= 5e-4 * total)
    sentences = f"Its time is {shares}. The largest term is {_TERMS_IN_WORDS[prediction.bound]}"
    most = max((term for term in TERMS if term != "compute"), key=lambda term: seconds[term])
    if seconds[most] > 0 and most != prediction.bound:
        sentences += f", the next {_TERMS_IN_WORDS[most]}"
    return f"{sentences}."


def _where_rows_go(prediction: Prediction, machine: Machine) -> list[str]:
    """Return over which links tokens travel to experts, and for how long compared with arithmetic."""
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
        f"Experts are sharded over {spread.parallel} ranks of {place}, at {format_bytes(rate)}/s: "
        f"{rows} of communication and {format_seconds(seconds['compute'])} of arithmetic"
    )
    # Half of the arithmetic is a rule of thumb, below which the exchange is not worth a remark.
    if nodes > 1 and seconds["experts"] > seconds["compute"] / 2:
        sentence += "; shard them over fewer nodes, or overlap the communication"
    return [f"{sentence}."]


def _behind(prediction: Prediction, best: Prediction) -> str:
    """Return by how much a configuration is slower than the fastest, and which term adds most."""
    mine, its = prediction.busiest.seconds, best.busiest.seconds
    # The term that grows most explains the difference best, even if other terms shrink.
    most = max(TERMS, key=lambda term: mine[term] - its[term])
    if mine[most] <= its[most]:
        return "takes the same time."
    longer, more = prediction.seconds / best.seconds - 1, format_seconds(mine[most] - its[most])
    return f"takes {longer:.1%} longer: {more} more of {_TERMS_IN_WORDS[most]}."


def _memory_in_words(prediction: Prediction) -> str:
    memory = prediction.memory
    kinds = ["parameters", "gradients", "optimizer", "buffers", "activations"]
    kinds += [kind for kind in ("logits", "attention") if getattr(memory, kind)]
    parts = ", ".join(f"{format_bytes(getattr(memory, kind))} {kind}" for kind in kinds)
    return f"{format_bytes(memory.total)} ({parts})"
