"""Schedules as text, and torch's own generators as a second opinion."""

from torch.distributed.pipelining import schedules as torch_schedules

from par_pipeline import Action, Schedule


def parsed(*lines):
    """A schedule from a line a rank, such as "0F0 0B0"."""
    return Schedule([[Action.parse(each) for each in line.split()] for line in lines])


def text(actions, *, stage=True):
    """A line for a rank, with or without the stage."""
    return " ".join(str(each) if stage else f"{each.op}{each.microbatch}" for each in actions)


def peaks(timeline):
    return [timeline.peak(rank) for rank in range(timeline.ranks)]


def most_idle(timeline):
    return max(timeline.idle(rank) for rank in range(timeline.ranks))


def longest_span(timeline):
    return max(timeline.span(rank) for rank in range(timeline.ranks))


def torch_actions(name, rank, ranks, microbatches, chunks=2):
    """The computation that torch's class lists for one rank, without making stages; of an overlapped pair, each."""
    kind = getattr(torch_schedules, name)
    made = object.__new__(kind)
    made.pp_group_size, made._n_microbatches = ranks, microbatches
    made.n_local_stages, made.num_stages, made._stages = chunks, ranks * chunks, list(range(chunks))
    made.microbatches_per_round = microbatches // max(1, microbatches // ranks)
    listed = [each for each in made._calculate_single_rank_operations(rank) if each is not None]
    flat = [part for each in listed for part in (each.sub_actions or [each])]
    return " ".join(str(each) for each in flat)


def torch_one_f_one_b(ranks, microbatches):
    """The order that torch's 1F1B gives when asked for it, gradient reductions left out."""
    made = object.__new__(torch_schedules.Schedule1F1B)
    made._num_stages, made._n_microbatches = ranks, microbatches
    order = made._get_pipeline_order()
    computed = [[each for each in order[rank] if each is not None and each.is_compute_op] for rank in range(ranks)]
    return [" ".join(str(each) for each in actions) for actions in computed]
