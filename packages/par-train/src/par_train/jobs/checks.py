"""What can be said about a run before any rank starts: the parallel config, the batch, the model. Imports no torch."""

import tempfile
from collections.abc import Mapping
from typing import Any

from par_groups import Topology
from par_pipeline import partition

from .._errors import UserError
from ..plan.schedules import make_schedule, microbatches_of
from .options import Options
from .order import check_size
from .text import Text, read_text

_LATER = ("sequence", "expert")


def check_config(options: Options, world_size: int) -> Topology:
    """Makes sure that the options make sense for a world of that size.

    Pure, and so the same on every rank.

    Raises:
        UserError: They do not.
    """
    if options.resume != "no" and options.overwrite:
        raise UserError(f"resume {options.resume} goes on, overwrite starts anew; give one")
    _refuse_other_axes(options)
    if options.zero == 3 and options.precision.endswith("-amp"):
        raise UserError(
            f"zero is 3 with precision {options.precision!r}, which would keep a cast copy of every weight until "
            f"backward; use precision {options.precision.removesuffix('-amp')!r}, or zero 2"
        )
    if options.model.width % options.model.heads:
        raise UserError(
            f"model.width {options.model.width} is not a multiple of model.heads {options.model.heads}; change one"
        )
    try:
        topology = Topology.from_config(_with_tensor_size(options.parallel), world_size)
    except ValueError as error:
        raise UserError(str(error)) from None
    _check_heads(options, topology)
    replicas = topology.size("data")
    if options.train.batch_size % replicas:
        near = max(1, round(options.train.batch_size / replicas)) * replicas
        raise UserError(
            f"train.batch_size {options.train.batch_size} does not divide by {replicas} data ranks; it is the batch of "
            f"all ranks together: use {near}, or another number of ranks"
        )
    _check_schedule(options, topology)
    return topology


def _check_heads(options: Options, topology: Topology) -> None:
    """Checks that heads can be shared out, where a mode gives each rank some."""
    tensor = options.parallel.get("tensor")
    if isinstance(tensor, Mapping) and "kv_heads" in tensor:
        raise UserError("parallel.tensor has kv_heads, but every head of this GPT has its own keys and values; drop it")
    if isinstance(tensor, Mapping) and tensor.get("mode") == "1d" and options.model.heads % topology.size("tensor"):
        raise UserError(
            f"model.heads {options.model.heads} does not divide by {topology.size('tensor')} tensor ranks, which have "
            "as many each; change one"
        )


def _check_schedule(options: Options, topology: Topology) -> None:
    """Checks that there is a schedule of that name, for these stages, layers and batches."""
    ranks = topology.size("pipeline")
    if ranks == 1:
        return
    microbatches = microbatches_of(options.pipeline.microbatches, ranks)
    rows = options.train.batch_size // topology.size("data")
    if rows < microbatches:
        raise UserError(
            f"pipeline.microbatches is {microbatches}, but a replica's batch has {rows} windows; lower it, or raise "
            f"train.batch_size {options.train.batch_size}"
        )
    try:
        found = make_schedule(options.pipeline.schedule, ranks, microbatches, zero=options.zero)
        partition(options.model.layers, found.stages)
    except ValueError as error:
        raise UserError(f"pipeline.schedule {options.pipeline.schedule!r} with {ranks} ranks: {error}") from None


def check_files(options: Options) -> Text:
    """Reads the text and makes sure that it, and the output folder, can be used.

    Raises:
        UserError: They cannot.
    """
    text = read_text(options.data)
    check_size(text, options.model)
    check_output(options)
    return text


def check_output(options: Options) -> None:
    """Makes sure that the output folder is there, can be written to, and is not another run's.

    Raises:
        UserError: It is not so.
    """
    files = options.files
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=files.folder):
            present = files.present()
    except OSError as error:
        raise UserError(
            f"cannot write to the output folder {options.output!r}: {error.strerror}; name another with --output"
        ) from None
    if present and not options.overwrite and options.resume == "no":
        raise UserError(
            f"the output folder {options.output!r} holds a run already ({present[0].name}); go on with --resume auto, "
            f"replace it with --overwrite, or name another with --output"
        )


def _with_tensor_size(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """A tensor mode without a size takes the ranks that the other axes leave."""
    tensor = parallel.get("tensor")
    if not isinstance(tensor, Mapping) or "size" in tensor or "mode" not in tensor:
        return dict(parallel)
    return {"data": 1, **parallel, "tensor": {**tensor, "size": -1}}


def _refuse_other_axes(options: Options) -> None:
    for axis in _LATER:
        value = options.parallel.get(axis, 1)
        size = value.get("size") if isinstance(value, Mapping) else value
        if isinstance(size, int) and size != 1:
            raise UserError(
                f"parallel.{axis} has size {size}, but this version of par-train trains with data, tensor and "
                f"pipeline parallelism alone; leave {axis} out"
            )
