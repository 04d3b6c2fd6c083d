"""What the planner's tests measure: small runs of the main job's trainer beside their predictions."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from par_data import FolderText
from par_groups import ProcessGroups, Topology
from par_plan.inputs import Machine
from par_plan.prediction import RankPrediction, predict
from par_testing import live_bytes, live_storages
from par_train.command.plan import configured_job
from par_train.jobs.byte_rows import text_rows
from par_train.jobs.options import ModelOptions, Options, ScheduleOptions, TrainOptions
from par_train.jobs.trainer import Trainer

MODEL = ModelOptions(width=64, layers=4, heads=4, context=16)  # all sizes divide by 16 x 4: nothing is padded
GLOO = Machine(gloo=True)


@dataclass
class Run:
    """A trainer that has made two steps, and what is predicted for this rank."""

    trainer: Trainer
    predicted: RankPrediction
    before: dict[int, torch.UntypedStorage]  # what there was without the trainer; kept, so that no address is reused

    def wait_for_bytes(self, low, high):
        """Bytes of all tensors that came with the trainer, as soon as they are within bounds."""
        return live_bytes(lambda found: low < found < high, without=self.before)


def text():
    data = bytes(range(1, 98)) * 60
    return FolderText(folder=Path("none"), files=1, train=data[:4000], held_out=data[4000:])


@contextmanager
def running(parallel, *, model=MODEL, schedule="1f1b", microbatches=0, offload=None, **changes) -> Iterator[Run]:
    """A run on the ranks there are, two steps after its start; `offload` is par-zero's, as a mapping."""
    topology = Topology.from_config(parallel, dist.get_world_size())
    pipeline = ScheduleOptions(schedule=schedule, microbatches=microbatches)
    options = Options(model=model, train=TrainOptions(batch_size=8), pipeline=pipeline, **changes)
    job = configured_job(options, topology)
    if offload is not None:
        job = replace(job, **offload["optimizer"])
        options = replace(options, zero={"stage": options.zero, "offload": offload})
    made = predict(options.model.shape, topology, job, GLOO)
    with ProcessGroups(topology) as groups:
        gc.collect()
        before = live_storages()
        trainer = Trainer(options, text_rows(options, text()), groups, torch.device("cpu"))
        for _ in range(2):
            trainer.advance(next(iter(trainer.loader)))
        yield Run(trainer, made.ranks[-1 if groups.rank("pipeline") else 0], before)


class SavedPeak:
    """The most bytes that autograd keeps at once inside a `with` block; each storage once, parameters not.

    Args:
        parameters: What does not count.
    """

    def __init__(self, parameters):
        self.peak = 0
        self._ignored = {each.untyped_storage().data_ptr() for each in parameters}
        self._live = {}
        self._lock = threading.Lock()

    def __enter__(self):
        # An output with its graph would hold the node that saves it, and no graph would be freed without a backward.
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda each: _Held(each.detach(), self), lambda held: held.tensor
        )
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def add(self, storage, times):
        if storage.data_ptr() in self._ignored:
            return
        key = storage._cdata
        with self._lock:  # backward runs in a thread of its own
            size, count = self._live.pop(key, (storage.nbytes(), 0))
            if count + times:
                self._live[key] = size, count + times
            self.peak = max(self.peak, sum(size for size, _ in self._live.values()))


class _Held:
    """What autograd keeps in place of a tensor, until it drops it."""

    def __init__(self, tensor, of):
        self.tensor, self._of = tensor, of
        of.add(tensor.untyped_storage(), 1)

    def __del__(self):
        self._of.add(self.tensor.untyped_storage(), -1)
