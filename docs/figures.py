"""Draws the pictures of these pages into docs/images/. Run as `python docs/figures.py`."""

import json
import math
import os
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from against import draw_against
from copies import draw_copies
from lanes import draw_lanes
from losses import draw_losses
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from moves import draw_moves
from regions import draw_region
from rooms import draw_rooms
from sequences import draw_sequences
from shards import draw_shards
from torch import nn
from travels import draw_travels
from versions import draw_versions
from watchdog import draw_watchdog
from ways import draw_ways

from par_groups import Topology, launch
from par_layers import (
    LoadBalancing,
    Router,
    RouterConfig,
    RouterLosses,
    TransformerShape,
    layer_cost,
    update_correction_bias_,
)
from par_pipeline import schedule, simulate
from par_plan import Machine, OffloadTiers, Shape, TrainingJob, search_configurations
from par_recompute import frontier, measure
from par_train.examples.grpo.curve import draw_curve
from par_train.run.metrics import draw_load, load_of
from par_zero import Moment, Overlap, Trace, draw_program, place, program, shard
from par_zero import simulate as simulate_placement

HALF_WIDTH, HALF_HEIGHT = 0.95, 0.48
IMAGES = Path(__file__).parent / "images"

PACKAGES = {
    "par-layers": "layers over\nseveral ranks",
    "par-pipeline": "schedules and\ntheir runtime",
    "par-precision": "fp16, bf16, fp8,\nclipping",
    "par-recompute": "activations,\nwithin a budget",
    "par-diagnosis": "which rank\nhangs, and why",
    "par-checkpoint": "sharded files,\nany topology",
    "par-zero": "ZeRO 0 to 3: data\nparallelism",
    "par-data": "samples in one\norder, packing",
}

TOPOLOGIES: dict[str, tuple[dict[str, Any], int]] = {
    "data2-pipeline2-tensor2": ({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 8),
    "tensor-2d": ({"tensor": {"size": 4, "mode": "2d"}}, 8),
    "experts-folded": ({"tensor": {"size": 2, "mode": "1d"}, "expert": {"size": 4, "tensor": 1}}, 8),
    "tensor-3d": ({"tensor": {"size": 8, "mode": "3d"}}, 8),
}

SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved", "zb_h1": "ZB-H1", "zb_v": "ZB-V", "v_min": "V-Min"}


def main() -> None:
    """Draws everything; the same input gives the same bytes."""
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # matplotlib's way to leave today's date out
    mpl.rcParams["svg.hashsalt"] = "par"
    mpl.rcParams["svg.fonttype"] = "none"
    IMAGES.mkdir(exist_ok=True)
    draw_star(IMAGES / "star.svg")
    draw_against(IMAGES / "against.svg")
    for name, (config, world_size) in TOPOLOGIES.items():
        Topology.from_config(config, world_size).draw(IMAGES / f"{name}.svg")
    draw_moves(IMAGES / "reshard.svg")
    draw_losses(IMAGES / "lost-rank.svg")
    draw_versions(IMAGES / "publish.svg")
    draw_curve(IMAGES / "grpo.jsonl", IMAGES / "grpo.svg")
    draw_layer_cost(IMAGES / "layer-cost.svg")
    draw_exposed(IMAGES / "exposed.svg")
    draw_expert_load(IMAGES / "expert-load.png")
    draw_memory(IMAGES / "context-memory.svg")
    draw_profile(IMAGES / "profile.svg")
    draw_kept(IMAGES / "recompute-kept.svg")
    draw_placements(IMAGES / "placement.svg")
    draw_tiers(IMAGES / "plan-tiers.svg")
    draw_budgets(IMAGES / "memory-budget.svg")
    draw_lanes(IMAGES / "offload-lanes.svg")
    draw_region(IMAGES / "region.svg")
    draw_travels(IMAGES / "experts-travel.svg")
    draw_copies(IMAGES / "checkpoint-copies.svg")
    draw_watchdog(IMAGES / "watchdog.svg")
    for name, title in SCHEDULES.items():
        simulate(schedule(name, 4, 8)).draw(IMAGES / f"schedule-{name.replace('_', '-')}.svg", title)
    draw_sequences(IMAGES)
    draw_shards(IMAGES / "data-shards.svg")
    draw_zero_step(IMAGES / "zero-program.svg")
    draw_rooms(IMAGES)
    draw_ways(IMAGES)


def draw_zero_step(path: Path) -> None:
    """Draws the program of a step at stage 3, of four blocks on one rank."""
    with launch():
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.AdamW(model.parameters())
        shard(model, optimizer, stage=3, group=dist.new_group([0]), overlap=Overlap(bucket=1, inflight=1))
        for _ in range(3):
            model(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if (done := program(model)) is not None:
            path.write_text(draw_program(done))


def draw_tiers(path: Path) -> None:
    """A step of 13e9 parameters on one device, as predicted, against the memory of the device."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    shape, job = Shape(layers=40, width=5120, heads=40, context=2048), TrainingJob(batch=4, precision="bf16")
    sizes = [size * 1e9 for size in range(60, 290, 5)]
    for label, host, disk, style in (
        ("the device alone", 0.0, 0.0, "-"),
        ("and a host of 170 GB", 170e9, 0.0, "--"),
        ("and a disk of 1 TB", 170e9, 1e12, ":"),
    ):
        machines = [
            Machine(memory=size, devices_per_node=1, tiers=OffloadTiers(host_memory=host, disk=disk)) for size in sizes
        ]
        steps = [search_configurations(shape, 1, job, machine, 1).best for machine in machines]
        axes.plot(
            [size / 1e9 for size, best in zip(sizes, steps, strict=True) if best],
            [best[0].seconds for best in steps if best],
            style,
            label=label,
        )
    axes.set_xlabel("memory of the device (GB)")
    axes.set_ylabel("step (s)")
    axes.set_yscale("log")
    axes.legend(frameon=False)
    figure.savefig(path)


def draw_budgets(path: Path) -> None:
    """A step of a small GPT against the budget of its device, with what was chosen at each, as measured."""
    rows = json.loads((Path(__file__).parent / "benchmarks" / "memory.json").read_text())["rows"]
    sizes = [float(row["device (MB)"]) for row in rows]
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    seconds = [float(row["seconds a step"]) for row in rows]
    above.plot(sizes, seconds, "o-", color="#1f5fa8")
    above.set_ylabel("step (s)")
    above.set_ylim(0, 1.15 * max(seconds))
    below.plot(sizes, [float(row["away"].rstrip("%")) for row in rows], "s--", label="state that stays on the disk (%)")
    below.plot(sizes, [float(row["kept (MB)"]) for row in rows], "o-", label="activations that layers keep (MB)")
    below.plot(
        sizes,
        [row["layers again"] + row["in parts"] for row in rows],
        "^:",
        label="layers that run again, or a part of them",
    )
    below.set_xlabel("budget of the device (MB)")
    below.legend(frameon=False, fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def draw_profile(path: Path) -> None:
    """What trace.json has of a step of a pipeline, as tools/profile_example.py has recorded it."""
    events = json.loads((IMAGES / "profile.json").read_text(encoding="utf-8"))
    ranks = sorted({event["rank"] for event in events})
    colors = {"F": "#8ecae6", "B": "#ffb703", "I": "#ffb703", "W": "#90be6d"}
    figure = Figure(figsize=(9, 1.0 + 0.7 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for event in events:
        row = ranks.index(event["rank"])
        letter = event["name"].lstrip("0123456789")[0]
        start, length = event["start"] / 1e3, event["length"] / 1e3
        axes.barh(row, length, left=start, height=0.8, color=colors[letter], edgecolor="white", linewidth=0.5)
        axes.text(start + length / 2, row, event["name"], ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}, pipeline" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title("a step of a pipeline in trace.json, 1F1B: stage, forward or backward, microbatch", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def draw_star(path: Path) -> None:
    """The packages: all import par-groups, none imports a sibling; par-plan plans for them, par-train imports all."""
    figure = Figure(figsize=(8, 6.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-4.2, 4.2)
    axes.set_ylim(-3.4, 3.4)
    axes.set_aspect("equal")
    axes.set_axis_off()
    for position, (name, purpose) in enumerate(PACKAGES.items()):
        angle = math.pi / 2 - 2 * math.pi * position / len(PACKAGES)
        x, y = 2.75 * math.cos(angle), 2.3 * math.sin(angle)
        edge = 1.12 * min(HALF_WIDTH / max(abs(x), 1e-9), HALF_HEIGHT / max(abs(y), 1e-9))  # where the middle box ends
        axes.annotate("", xy=(edge * x, edge * y), xytext=(x, y), arrowprops={"arrowstyle": "->"}, zorder=0)
        draw_package(axes, (x, y), name, purpose)
    draw_package(axes, (0, 0), "par-groups", "which ranks\nwork together")
    text = "par-plan predicts what they take; par-train wires all of them into one entry point"
    axes.text(0, -3.05, text, ha="center", weight="bold", color="#1f5fa8")
    frame = mpl.patches.FancyBboxPatch(
        (-4, -3.2), 8, 6.4, boxstyle="round,pad=0,rounding_size=0.3", fill=False, lw=1.6, color="#1f5fa8"
    )
    axes.add_patch(frame)
    figure.savefig(path)


def draw_layer_cost(path: Path) -> None:
    """What a rank receives for one transformer layer, against the number of ranks."""
    shape = TransformerShape(tokens=65_536, width=8_192)
    lines: dict[str, list[tuple[int, float]]] = {
        "1d": [(p, received("1d", {"tensor": p}, shape)) for p in (2, 4, 8, 16, 32, 64, 128, 256, 512)],
        "2d": [(q * q, received("2d", {"row": q, "col": q}, shape)) for q in (2, 4, 8, 16)],
        "2.5d, depth 2": [
            (2 * q * q, received("2.5d", {"depth": 2, "row": q, "col": q}, shape)) for q in (2, 4, 8, 16)
        ],
        "3d": [(d**3, received("3d", dict.fromkeys(("output", "input", "weight"), d), shape)) for d in (2, 4, 8)],
    }
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks in the tensor group")
    axes.set_ylabel("elements received, a layer and rank")
    axes.set_title(f"{shape.tokens:,} tokens of width {shape.width:,}, forward and backward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def received(mode: str, sizes: dict[str, int], shape: TransformerShape) -> float:
    """Elements a step, with what is summed once."""
    predicted = layer_cost(mode, sizes, shape)
    return float(predicted.each + predicted.once)


def draw_kept(path: Path) -> None:
    """What a block of GPT keeps, against what it computes again: the best choices, and the whole layer."""
    tokens, width = 1024, 512
    rows, product = tokens * width * 4, 2 * tokens * width**2
    table = measure(PlainBlock(width, 8), torch.empty(1, tokens, width, requires_grad=True))
    choices = frontier(table, 1e12, bandwidth=1e11)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    again = [choice.seconds * 1e12 / product / 12 for choice in choices]
    axes.step(again, [choice.bytes / rows for choice in choices], where="post", marker="o")
    names = {(): "everything is kept", ("",): "the whole layer", ("act", "ln1", "ln2"): 'no product again: "cheap"'}
    names[("act", "fc", "ln1", "ln2")] = "and the first product of the MLP"
    names[("act", "attn.qkv", "fc", "ln1", "ln2")] = "and the product for q, k, v"
    for x, choice in zip(again, choices, strict=True):
        if label := names.get(tuple(sorted(choice.dropped))):
            axes.annotate(label, (x, choice.bytes / rows), xytext=(6, 6), textcoords="offset points", fontsize=8)
    axes.set_xlabel("what is done again, as a part of the products of a forward (a byte as 10 operations)")
    axes.set_ylabel("kept, in activations as wide as the block")
    axes.set_ylim(0, 18)
    axes.set_xlim(right=1.25 * again[-1])
    axes.grid(alpha=0.3)
    figure.savefig(path)


def draw_placements(path: Path) -> None:
    """Which of 12 units is on the device at which moment of a step of two microbatches, with room for 5."""
    units = [f"unit {number}" for number in range(12)]
    forward = [Moment(kind="forward", unit=unit) for unit in units]
    backward = [Moment(kind="backward", unit=unit) for unit in reversed(units)]
    trace = Trace((*forward, *backward, *forward, *backward, Moment(kind="step")))
    sizes = dict.fromkeys(units, 1)
    policies = {"behind": "behind", "static": "static", "next_use": "next use"}
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    panels = figure.subplots(len(policies), sharex=True)
    for axes, (policy, title) in zip(panels, policies.items(), strict=True):
        placement = place(trace, sizes, 5, policy)
        since: dict[str, int] = {}
        fetches = []
        for number, (moment, moves) in enumerate(zip(trace.moments, placement.moves, strict=True)):
            for unit, tier in moves:
                row = units.index(unit)
                if tier == "device":
                    since[unit] = number
                    fetches.append((number, row + 0.5))
                else:
                    start = since.pop(unit)
                    axes.broken_barh([(start, number - start)], (row + 0.1, 0.8), color="#bcd2e8")
            if moment.unit is not None:
                axes.broken_barh([(number, 1)], (units.index(moment.unit) + 0.1, 0.8), color="#2b6cb0", zorder=2)
        axes.plot(*zip(*fetches, strict=True), "o", color="#c05621", markersize=3, zorder=3)
        count = sum(simulate_placement(trace, sizes, placement).fetched.values())
        axes.set_title(f"{title}: {count} fetches", fontsize=10, loc="left")
        axes.set_ylim(len(units), 0)
        axes.set_ylabel("unit")
        for x in range(0, len(trace.moments), len(units)):
            axes.axvline(x, color="#888888", linewidth=0.5)
    passes = ["forward", "backward", "forward", "backward"]
    panels[-1].set_xticks([len(units) * (number + 0.5) for number in range(len(passes))], passes)
    panels[-1].set_xlim(0, len(trace.moments) - 1)
    figure.savefig(path)


class PlainAttention(nn.Module):
    """Attention with one product for q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width], causal."""
        batch, tokens, width = x.shape
        q, k, v = (y.view(batch, tokens, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(width, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return y


class PlainBlock(nn.Module):
    """A block of GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), PlainAttention(width, heads), nn.LayerNorm(width)
        self.fc, self.act, self.out = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width]."""
        x = x + self.attn(self.ln1(x))
        y: torch.Tensor = x + self.out(self.act(self.fc(self.ln2(x))))
        return y


def draw_exposed(path: Path) -> None:
    """The share of a step in which ranks wait, by program, as the benchmark has reckoned it."""
    rows = json.loads((Path(__file__).parent / "benchmarks" / "exposed.json").read_text())["rows"]
    places = list(dict.fromkeys((row["model"], row["GPUs"]) for row in rows))
    of_place = [[row for row in rows if (row["model"], row["GPUs"]) == place] for place in places]
    heights = [len(each) + 1 for each in of_place]
    figure = Figure(figsize=(8, 0.28 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(places), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (model, gpus), each in zip(panels, places, of_place, strict=True):
        shares = [float(row["waits"].rstrip("%")) for row in each]
        ours = [row["program"].startswith("par-") for row in each]
        bars = axes.barh(
            [row["program"] for row in each], shares, color=["#1f5fa8" if own else "#b8b8b8" for own in ours]
        )
        axes.bar_label(bars, [row["waits"] for row in each], padding=3, fontsize=8)
        axes.set_title(f"{model} on {gpus} GPUs", fontsize=10, loc="left")
        axes.tick_params(labelsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
    panels[-1].set_xlabel("waits, % of a step")
    figure.savefig(path)


def draw_memory(path: Path) -> None:
    """What a rank needs for a step, against the length of the sequence, as the benchmark has measured it."""
    sections = json.loads((Path(__file__).parent / "benchmarks" / "context.json").read_text())["sections"]
    rows = next(section["rows"] for section in sections if section["title"] == "Memory")
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault((row["ranks"], row["mode"]), []).append((row["tokens"], float(row["peak MiB"])))
    (alone,) = (points for (ranks, _), points in lines.items() if ranks == 1)
    for number, ((ranks, mode), points) in enumerate(lines.items()):
        label = "1 rank" if ranks == 1 else f"{ranks} ranks, {mode}"
        axes.plot(*zip(*points, strict=True), marker="o", ls="-" if len(points) > 1 else "", label=label, zorder=3)
        if mode == "gather":
            ideal = [(ranks * tokens, needed) for tokens, needed in alone]
            hint = f"as one rank with a {'half' if ranks == 2 else 'quarter'} of it"
            axes.plot(*zip(*ideal, strict=True), ls=":", color=f"C{number}", lw=1, label=hint)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("MiB that a rank needs for a step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)


def draw_expert_load(path: Path) -> None:
    """Routers of three layers that a bias of the choice balances: each expert's tokens over a hundred steps."""
    torch.manual_seed(0)
    balance = LoadBalancing(bias_update_rate=2e-3)
    config = RouterConfig(scoring_func="sigmoid", correction_bias=True)
    routers = nn.ModuleDict(
        {f"layer {number}": Router(16, 8, 2, balance=balance, config=config) for number in range(3)}
    )
    losses, lines = RouterLosses(routers), []
    for step in range(2, 102, 2):
        for _ in range(2):
            for router in routers.values():
                router(0.7 * torch.randn(512, 16) + 0.9)
            update_correction_bias_(routers)
        lines.append({"step": step, "expert_load": load_of(losses.load())})
    draw_load(path, lines)


def draw_package(axes: Axes, centre: tuple[float, float], name: str, purpose: str) -> None:
    """A box with the package's name and its purpose."""
    x, y = centre
    box = mpl.patches.FancyBboxPatch(
        (x - HALF_WIDTH, y - HALF_HEIGHT),
        2 * HALF_WIDTH,
        2 * HALF_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.15",
        facecolor="#dce9f7",
        edgecolor="#1f5fa8",
    )
    axes.add_patch(box)
    axes.text(x, y + 0.22, name, ha="center", va="center", weight="bold", fontsize=10)
    axes.text(x, y - 0.17, purpose, ha="center", va="center", fontsize=8)


if __name__ == "__main__":
    main()
