"""The second decision within a budget, after the first step: saved activations, and state that returns from the disk.

Both uses of free memory save seconds. A layer that saves more recomputes less, and state in memory is not read and
written in each step. `spend` takes what saves most.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from par_groups import format_bytes, format_seconds
from par_recompute import Choice, Choices
from par_zero import DiskUsage

from .plan import BudgetPlan, least_in_words
from .savings import Saving, spend
from .tiers import TooSmallError


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Measurements of the first step on a rank.

    Args:
        models: Possible saved activations of the layers, for each model.
        held: Number of microbatches whose activations are kept at a time.
        disk: State on the disk, and the speed of the disk.
        other: Bytes of the device that were in use after the step by anything else than state. Default: 0.
        peak: Largest number of bytes of the device in use during the step. Default: 0, not measured.
    """

    models: tuple[Choices, ...]
    held: float
    disk: DiskUsage
    other: float = 0.0
    peak: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """Budgets of activations, and state to return from the disk, after the first step.

    Args:
        budgets: Bytes that the layers of each model may keep of a microbatch.
        recall: Bytes of state that come back from the disk.
        spent: All that was chosen, with the reasons.
    """

    budgets: tuple[int, ...]
    recall: int
    spent: BudgetPlan


def plan_measured(spent: BudgetPlan, measured: MeasuredStep) -> MeasuredPlan:
    """Return the use of free device memory that saves most seconds.

    A layer that does not save everything is recomputed. The largest layer must fit during recomputation.

    Args:
        spent: Plan before the first step.
        measured: Measurements of the first step.

    Raises:
        TooSmallError: The device memory is too small even for the inputs of layers.
    """
    held = measured.held
    frontiers = [[one for one in model.frontiers if one] for model in measured.models]
    every = [frontier for of_model in frontiers for frontier in of_model]
    fewest = [[min(choice.bytes for choice in one) for one in of_model] for of_model in frontiers]
    inputs = held * sum(map(sum, fewest))
    most = held * sum(max(choice.bytes for choice in one) for one in every)
    layer = max((max(choice.bytes for choice in one) for one in every), default=0)
    on_disk = sum(measured.disk.pieces)
    expected = spent.state - spent.later + inputs + layer
    # The peak also shows tensors that were free again when the step had ended.
    other = max(0.0, measured.other, measured.peak - expected)
    if other:
        text = f"other: {format_bytes(other)} of the device hold tensors that are neither state nor saved activations."
        # The last reason is about activations, and is replaced below.
        reasons_so_far = (*spent.reasons[:-1], text, spent.reasons[-1])
        spent = replace(spent, kinds={**spent.kinds, "other tensors": other}, reasons=reasons_so_far)
    everything = room = spent.budget.device - spent.state
    # If something is recomputed, all activations of the layer in question exist while backward uses them.
    if most + on_disk > room:
        room -= layer
    if room < inputs:
        parts = {**spent.kinds, "inputs of layers": inputs, "one layer": layer}
        words = least_in_words("device", spent.budget.device, parts)
        raise TooSmallError("device", inputs - room, f"{words}; raise it, or train fewer rows at a time")
    # Each step reads the state of a tensor and writes it back.
    per_byte = 1 / measured.disk.read + 1 / measured.disk.write
    state = [Saving("state", size, size * per_byte) for size in measured.disk.pieces]
    kept = [
        # Bytes are kept for all microbatches that wait for their backward; seconds are saved in every forward.
        Saving(f"layers {number}", held * size, model.forwards * seconds)
        for number, (model, of_model) in enumerate(zip(measured.models, frontiers, strict=True))
        for one in of_model
        for size, seconds in _increments(one)
    ]
    chosen = spend([*kept, *state], room - inputs)
    # Activations are free when the optimizer steps, and gradients in its dtype take their memory. State must fit next
    # to these.
    in_step = max(0.0, everything - spent.step)  # for state, which is there then, too
    if sum(item.bytes for item in chosen if item.name == "state") > in_step:
        back = spend(state, in_step)
        chosen = [*back, *spend(kept, room - inputs - sum(item.bytes for item in back))]
    taken = {name: sum(item.bytes for item in chosen if item.name == name) for name in {item.name for item in chosen}}
    recall = int(taken.get("state", 0.0))
    budgets = [int(sum(few) + taken.get(f"layers {number}", 0.0) / held) for number, few in enumerate(fewest)]
    left = room - held * sum(budgets) - recall
    if budgets:  # what lies between two choices of a layer is of use to none of the others
        budgets[0] += max(0, int(left / held))
    keeps = min(most, held * sum(budgets))
    again = sum(item.seconds for item in kept) - sum(item.seconds for item in chosen if item.name != "state")
    # Some state would have fit, so activations that save more per byte have taken its place.
    displaced = not recall and any(size <= min(room - inputs, in_step) for size in measured.disk.pieces)
    reasons = [*spent.reasons[:-1]]
    if on_disk:
        reasons.append(
            _about_disk(on_disk, recall, on_disk * per_byte, measured.disk, full=keeps >= most and not displaced)
        )
    reasons.append(_about_layers(keeps, most, again) if every else spent.reasons[-1])
    return MeasuredPlan(
        budgets=tuple(budgets),
        recall=recall,
        spent=replace(spent, reasons=tuple(reasons), is_open=False, recalled=float(recall)),
    )


def _increments(frontier: Iterable[Choice]) -> list[tuple[int, float]]:
    """Return bytes and saved seconds of each further activation of a layer, the best ratio first."""
    choices = sorted(frontier, key=lambda choice: choice.bytes)
    found: list[tuple[int, float]] = []
    current = choices[0]
    while True:
        more = [
            (choice.bytes - current.bytes, current.seconds - choice.seconds, choice)
            for choice in choices
            if choice.bytes > current.bytes and choice.seconds < current.seconds
        ]
        if not more:
            return found
        # Each increment has the best rate from where the one before ended, so rates fall, and `spend` takes them in
        # order.
        size, seconds, current = max(more, key=lambda one: (one[1] / one[0], one[0]))
        found.append((size, seconds))


def _about_disk(there: float, recall: float, seconds: float, disk: DiskUsage, *, full: bool) -> str:
    """Return a sentence about the state that returns from the disk."""
    rates = f"{format_bytes(disk.read)}/s read and {format_bytes(disk.write)}/s written"
    took = f"{format_bytes(there)} of offloaded state would take {format_seconds(seconds)} per step, at {rates}"
    if not recall:
        why = "the device is full" if full else "saved activations save more time per byte"
        return f"disk: {took}; all of it stays on the disk: {why}."
    if recall >= there:
        return f"disk: {took}; all of it returns to memory."
    why = "the device is then full" if full else "this saves more time per byte than saved activations"
    return f"disk: {took}; {format_bytes(recall)} return to memory: {why}."


def _about_layers(keeps: float, most: float, again: float) -> str:
    """Return a sentence about saved activations, and the time to recompute the rest."""
    if keeps >= most:
        return f"activations: layers save all of their {format_bytes(most)}."
    return (
        f"activations: layers save up to {format_bytes(keeps)} of {format_bytes(most)}, and recompute the rest in "
        f"{format_seconds(again)} per step."
    )
