"""Canonical numerics: the fingerprint of a run, and the loop of one device in plain torch that all cells repeat."""

import functools
import hashlib
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from par_data import ShardedDataLoader
from par_groups import Digest, LaneCounts, digest_of
from par_layers import RouterLosses, initialize, layer_set, parallelize
from par_precision.exact.grid import GridHooks
from par_precision.exact.squares import exact_squares, squares_of
from par_precision.exact.sums import MARGIN
from par_train.jobs.byte_gpt import fill_, make_gpt

from ._cases import Case
from ._training import (
    CLIP_NORM,
    CONTEXT,
    IN_LANES,
    OURS,
    SEED,
    SMALL,
    Curve,
    adamw,
    cut_by_documents,
    endless,
    existing,
    gpt,
    loader,
    packed,
    summed,
    warm_up,
)

LANES = LaneCounts(data=8)
"""One row of a batch each. 1, 2 and 4 data ranks divide them."""

LAYER_LANES = LaneCounts(data=8, tensor=4, sequence=4)
"""The same, and four blocks of each sharded weight and of each sequence, also on ranks that have all of them."""

TENSOR_LANES = LaneCounts(data=8, tensor=4)

IN_THREES = replace(LAYER_LANES, data=12)
"""The same for three data ranks."""

PRECISIONS = ("fp32", "bf16")
SO_FAR = ("data", "pipeline", "tensor", "sequence", "expert")
"""Axes whose cells must run. A cell with another axis joins as soon as a strategy accepts it."""


def canonical(case: Case, lanes: LaneCounts = LANES) -> Case:
    """Return a configuration with canonical numerics, whose microbatches are the lanes of a data rank."""
    pipeline = {name: value for name, value in case.options["pipeline"].items() if name != "microbatches"}
    return replace(case, options={**case.options, "pipeline": pipeline, "numerics": "canonical", "lanes": lanes})


def must_run(case: Case) -> bool:
    """Whether a strategy may not refuse this configuration."""
    parallel = case.options["parallel"]
    is_exact = set(parallel).issubset(SO_FAR) and parallel.get("tensor", {"mode": "1d"})["mode"] == "1d"
    is_exact = is_exact and parallel.get("sequence", {"mode": "gather"})["mode"] == "gather"
    one_lane = {"Packed": ("tensor",), "Mixture": ("sequence",)}.get(case.model, ())
    return is_exact and parallel.keys().isdisjoint(one_lane) and not case.muon


def lanes_of(case: Case) -> LaneCounts:
    """Return the lanes of a configuration: tensor lanes do not divide the packed model, sequence lanes no experts."""
    if case.options["parallel"]["data"] == 3:
        return IN_THREES
    return {"Packed": LaneCounts(data=8, sequence=4), "Mixture": TENSOR_LANES}.get(case.model, LAYER_LANES)


def fingerprint(digest: Digest, curve: Curve) -> str:
    """Twelve digits of a sha256 of the weights after the last step and of each step's norm, to the last bit."""
    lines = [str(digest), *(norm.hex() for norm in curve.norms)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@functools.cache
def one_device(
    precision: str,
    steps: int,
    blocks: int,
    device: str,
    *,
    tied: bool,
    model: str = "GPT",
    lanes: LaneCounts = LANES,
) -> tuple[Digest, Curve]:
    """The weights and the curve of one device without a strategy: one lane after the other, the last one first."""
    layers, sizes = layer_set(None, lanes=lanes), SMALL if lanes.tensor == 1 else IN_LANES
    whole: Any
    if model == "Packed":
        whole = fill_(make_gpt(packed(blocks, tied=tied), layers), SEED)
    elif model in OURS:
        whole = gpt(layers, blocks, tied=tied, experts=model == "Mixture", sizes=sizes)
        initialize(whole, SEED)
    else:
        whole = existing(model, blocks, tied=tied, sizes=sizes)
        if lanes.in_layers:
            layers.context.transformers_(whole)
            parallelize(whole, layers)
    whole.to(device)
    weights = dict(whole.named_parameters())
    masters = nn.ParameterList(weight.detach().clone() for weight in weights.values())
    optimizer = adamw(masters)
    schedule = warm_up(optimizer)
    for weight in weights.values():
        weight.data = weight.data.to(torch.bfloat16 if precision == "bf16" else torch.float32)
    GridHooks(whole, lanes.data)
    data = ShardedDataLoader(loader(lanes.data), rank=0, num_replicas=1, seed=SEED)
    data.device = torch.device(device)
    losses = RouterLosses(whole)
    batches, curve, scale = endless(data), Curve([], []), MARGIN * 2.0 ** round(math.log2(CONTEXT * lanes.data))
    cut = cut_by_documents(layers.context)
    for _ in range(steps):
        rows, total = next(batches), 0.0
        for lane in reversed(range(lanes.data)):
            own = tuple(tensor[lane : lane + 1] for tensor in rows)
            mean, weight = lane_loss(whole, layers, own, model, cut)
            losses.scale = torch.tensor(weight / scale, dtype=torch.float64).to(mean.dtype)
            (mean * losses.scale).backward()
            total += weight
        gradients = [weight.grad.float() for weight in weights.values()]
        top = max(gradient.abs().amax() for gradient in gradients).double()
        divisor = torch.tensor(total / scale, dtype=torch.float64)
        norm = squares_of(exact_squares(gradients, top), top).sqrt() / divisor
        factor = (CLIP_NORM / norm).clamp(max=1.0) / divisor
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        optimizer.grad_scale, optimizer.found_inf = factor.reciprocal().float(), None
        optimizer.step()
        schedule.step()
        for master, weight in zip(masters, weights.values(), strict=True):
            weight.grad = None
            weight.data.copy_(master.data)
        scale = MARGIN * 2.0 ** round(math.log2(total))
        curve.norms.append(norm.item())
    return digest_of(zip(weights, masters, strict=True), None), curve


def lane_loss(whole: Any, layers: Any, rows: tuple[Tensor, Tensor], model: str, cut: Any) -> tuple[Tensor, float]:
    """The loss of a lane, a mean, and what it weighs: 1 as a mean over rows, or its number of targets."""
    inputs, targets = rows
    if model == "Packed":
        batch = cut(rows)
        counts = float(batch.target[1].sum())
        return summed(whole, whole(*batch.inputs, **batch.kwargs).float(), batch.target[0]) / counts, counts
    if model in OURS:
        return layers.cross_entropy(whole(inputs).float(), targets, classes=whole[-1].head.vocabulary), 1.0
    counts = targets.numel()
    if layers.rules.lanes.in_layers:
        batch, tokens = layers.context.cut({"input_ids": inputs})
        logits = whole(**batch, par_tokens=tokens, use_cache=False).logits.float().flatten(0, 1)
        loss = layers.cross_entropy(logits, targets.flatten(), classes=logits.shape[-1], reduction="sum")
        return loss / counts, float(counts)
    logits = whole(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / counts, float(counts)
