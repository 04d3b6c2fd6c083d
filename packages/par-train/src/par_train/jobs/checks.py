"""Checks of the options of a run before any rank starts: parallel config, batch, model, files. Imports no torch."""

import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from par_data import FolderText
from par_groups import EXPERTS, Topology, data_axes, format_bytes
from par_pipeline import partition

from .._errors import UserError, as_user_error
from ..run.trackers import check_trackers
from ..strategy.settings import check_autocast, make_schedule, microbatches_of, read_recompute, read_steps
from .existing.folder import ModelFolder, read_folder
from .options import OF_EXPERTS, AdapterOptions, MemoryOptions, Options, SampleOptions
from .text import check_size, read_text

_OF_GPT = (
    *("data.folder", "data.patterns", "data.documents"),
    *("model.width", "model.layers", "model.heads", "model.context", "model.tied"),
    *(f"model.{name}" for name in ("experts", *OF_EXPERTS)),
)
_OF_EXISTING = (
    *("data.path", "data.sources", "data.format", "data.field", "data.template", "data.context"),
    *("model.attention", "model.dtype"),
    *(f"adapter.{one.name}" for one in fields(AdapterOptions)),
    *(f"sample.{one.name}" for one in fields(SampleOptions)),
)

_DRIVERS = (
    *("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"),
    *("/dev/dri", "/dev/accel", "/dev/davinci_manager"),
)
"""Paths of which a host with an accelerator has one."""


def check_config(options: Options, world_size: int) -> Topology:
    """Check the options for a world size. Pure, so every rank raises the same error.

    Args:
        options: The options.
        world_size: Number of ranks.

    Raises:
        UserError: An option has a wrong value, or options contradict each other.
    """
    if options.resume != "no" and options.overwrite:
        raise UserError(f"resume {options.resume} goes on, overwrite starts anew; give one")
    check_kind(options)
    check_trackers(options.trackers)
    if options.profile:
        read_steps(options.profile)
    _check_memory(options.memory)
    _check_tiers(options)
    with as_user_error():
        check_autocast(options.zero, options.precision)
        if options.recompute:
            read_recompute(options.recompute)
        topology = Topology.from_config(_with_tensor_size(options.parallel), world_size)
    if options.model.folder:
        _check_mode(options, topology)
    else:
        _check_heads(options, topology)
        _check_experts(options, topology)
    replicas = topology.size(data_axes(topology))
    if options.train.batch_size % replicas:
        near = max(1, round(options.train.batch_size / replicas)) * replicas
        raise UserError(
            f"train.batch_size {options.train.batch_size} does not divide by {replicas} data ranks; it is the batch of "
            f"all ranks together: use {near}, or another number of ranks"
        )
    _check_lanes(options, topology)
    _check_schedule(options, topology)
    return topology


def _check_lanes(options: Options, topology: Topology) -> None:
    """Check that ordinary numerics have no lanes, and canonical ones have lanes that fit the batch and the ranks."""
    lanes, replicas = options.lane_counts, topology.size(data_axes(topology))
    if lanes is None and (options.tensor_lanes, options.sequence_lanes) != (1, 1):
        raise UserError(
            f"tensor_lanes {options.tensor_lanes}, sequence_lanes {options.sequence_lanes}: they need canonical "
            "numerics; add --numerics canonical --lanes 8"
        )
    if (options.numerics == "canonical") != bool(options.lanes):
        raise UserError(
            f"numerics {options.numerics} with lanes {options.lanes}: canonical numerics need a number of lanes, and "
            "ordinary ones have none; set both, such as --numerics canonical --lanes 8"
        )
    if options.lanes and (options.train.batch_size % options.lanes or options.lanes % replicas):
        raise UserError(
            f"lanes {options.lanes} must divide train.batch_size {options.train.batch_size}, and {replicas} data ranks "
            f"must divide lanes; use lanes {options.train.batch_size}, or another batch"
        )
    if lanes is not None:
        with as_user_error():
            lanes.check(topology)


def check_kind(options: Options) -> None:
    """Check that the options are for one kind of model: the byte-level GPT, or a transformers model.

    An option with its default value counts as absent.

    Raises:
        UserError: Options are for both kinds, or a required option is missing.
    """
    model = options.model
    if model.path and model.config:
        raise UserError(
            f"model.path is {model.path!r}, whose weights are read, and model.config is {model.config!r}, which is "
            "trained from random weights; give one"
        )
    defaults = Options()
    if not model.folder:
        given = _first_given(options, defaults, [f"model.{name}" for name in OF_EXPERTS])
        if not model.experts and given is not None:
            raise UserError(
                f"{given} is given, but model.experts is 0, so blocks have MLPs; give the number of experts"
            )
        given = _first_given(options, defaults, _OF_EXISTING)
        if given is not None:
            raise UserError(
                f"{given} is for a model of transformers, and without model.path a byte-level GPT is trained; add "
                f"--model.path, or leave {given} out"
            )
        if options.data.packing == "auto" and options.data.documents != defaults.data.documents:
            raise UserError(
                f"data.documents is {options.data.documents!r}, but data.packing is 'auto', which trains on windows "
                "that know of no documents; give data.packing 'whole' or 'stream', or leave data.documents out"
            )
        return
    key = "model.path" if model.path else "model.config"
    given = _first_given(options, defaults, _OF_GPT)
    if given is not None:
        raise UserError(
            f"{given} is for the byte-level GPT, and {key} {model.folder!r} is a model of transformers; leave one out"
        )
    given = _first_given(options, defaults, [name for name in _OF_EXISTING if name.startswith("adapter.")])
    if options.adapter.rank == 0 and given is not None:
        raise UserError(f"{given} is given, but adapter.rank is 0, which trains the model; give the adapter's rank")
    if options.adapter.rank and model.config:
        raise UserError(
            f"adapter.rank is {options.adapter.rank} with model.config {model.config!r}, whose weights are random and "
            "would stay so; use model.path"
        )
    if not options.sample.prompts and _first_given(options, defaults, ["sample.tokens", "sample.every"]) is not None:
        raise UserError("sample.prompts is empty, so nothing is sampled; give a prompt, or leave [sample] out")


def _first_given(options: Options, defaults: Options, names: Iterable[str]) -> str | None:
    """Return the first of some options whose value is not its default; None if all have their defaults."""
    for name in names:
        table, _, key = name.partition(".")
        if getattr(getattr(options, table), key) != getattr(getattr(defaults, table), key):
            return name
    return None


def _check_mode(options: Options, topology: Topology) -> None:
    """Check that an existing model can be sharded in this way, as far as possible without the model."""
    tensor = options.parallel.get("tensor")
    mode = tensor.get("mode") if isinstance(tensor, Mapping) else None
    if topology.size("tensor") > 1 and mode != "1d":
        raise UserError(
            f"parallel.tensor.mode is {mode!r}, which cuts activations that the code of {options.model.folder!r} takes "
            "whole; use mode '1d'"
        )
    over = f"but parallel.sequence has size {topology.size('sequence')}"
    if topology.size("sequence") > 1 and options.model.attention:
        raise UserError(
            f"model.attention is {options.model.attention!r}, {over}, and attention is computed over these ranks; "
            "leave it out"
        )
    if topology.size("sequence") > 1 and options.adapter.dropout:
        raise UserError(
            f"adapter.dropout is {options.adapter.dropout!r}, {over}, and what is dropped cannot be equal over these "
            "ranks; set it to 0"
        )


def _check_heads(options: Options, topology: Topology) -> None:
    """Check that the GPT's heads divide over the tensor ranks, if the mode distributes heads."""
    if options.model.width % options.model.heads:
        raise UserError(
            f"model.width {options.model.width} is not a multiple of model.heads {options.model.heads}; change one"
        )
    tensor = options.parallel.get("tensor")
    if isinstance(tensor, Mapping) and "kv_heads" in tensor:
        raise UserError("parallel.tensor has kv_heads, but every head of this GPT has its own keys and values; drop it")
    if isinstance(tensor, Mapping) and tensor.get("mode") == "1d" and options.model.heads % topology.size("tensor"):
        raise UserError(
            f"model.heads {options.model.heads} does not divide by {topology.size('tensor')} tensor ranks, which have "
            "as many each; change one"
        )


def _check_schedule(options: Options, topology: Topology) -> None:
    """Check that the schedule exists, and fits the stages, the layers and the batch."""
    ranks = topology.size("pipeline")
    if ranks == 1:
        return
    replicas = topology.size(data_axes(topology))
    # Every lane is a microbatch of its own, so that what a lane computes does not depend on the number of ranks.
    given = options.lanes // replicas if options.lanes else options.pipeline.microbatches
    microbatches = microbatches_of(given, ranks)
    rows = options.train.batch_size // replicas
    if rows < microbatches:
        what = "rows" if options.model.folder else "windows"
        raise UserError(
            f"pipeline.microbatches is {microbatches}, but a replica's batch has {rows} {what}; lower it, or raise "
            f"train.batch_size {options.train.batch_size}"
        )
    with as_user_error(f"pipeline.schedule {options.pipeline.schedule!r} with {ranks} ranks: "):
        found = make_schedule(options.pipeline.schedule, ranks, microbatches, zero=options.zero)
        # The layers of an existing model are known only once its folder is read.
        if not options.model.folder:
            partition(options.model.layers, found.stages)


def read_files(options: Options) -> FolderText | ModelFolder:
    """Read the text, or the config of the model.

    Raises:
        UserError: A file or a folder is not usable.
    """
    if options.model.folder:
        return read_folder(options)
    found = read_text(options.data)
    check_size(found, options)
    return found


def check_output(options: Options) -> None:
    """Create the output folder, and check that it is writable and has no run that would be lost.

    Raises:
        UserError: The folder is not writable, or has a run that is neither resumed nor replaced.
    """
    if "://" in options.output_folder:
        raise UserError(
            f"output {options.output_folder!r} is a URL, and the output folder is local; name a folder with --output, "
            "and the URL in checkpoint.tiers"
        )
    files = options.files
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        # Only a trial shows whether files can be made: permission bits say nothing about a read-only file system.
        with tempfile.TemporaryFile(dir=files.folder):
            present = files.present()
    except OSError as error:
        raise UserError(
            f"cannot write to the output folder {options.output_folder!r}: {error.strerror}; name another with --output"
        ) from None
    if present and not options.overwrite and options.resume == "no":
        raise UserError(
            f"the output folder {options.output_folder!r} holds a run already ({present[0].name}); go on with "
            "--resume auto, replace it with --overwrite, or name another with --output"
        )


def _with_tensor_size(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in which a tensor mode without a size takes the ranks that the other axes leave."""
    tensor = parallel.get("tensor")
    if not isinstance(tensor, Mapping) or "size" in tensor or "mode" not in tensor:
        return dict(parallel)
    # Only one axis may take the ranks that are left, and without this it would be "data".
    return {"data": 1, **parallel, "tensor": {**tensor, "size": -1}}


def _check_memory(memory: MemoryOptions) -> None:
    """Check that offloading has a limit for the device, and that a disk has a folder."""
    if not memory.device and (memory.host or memory.disk or memory.path):
        raise UserError(
            "memory.device is 0, so all of the device may be taken and nothing lies elsewhere; give its bytes, such as "
            "80GB, or leave [memory] out"
        )
    if bool(memory.disk) != bool(memory.path):
        raise UserError(
            f"memory.disk is {format_bytes(memory.disk)} and memory.path {memory.path!r}; give both, or none of them"
        )


def _check_tiers(options: Options) -> None:
    """Check tiers without access to them; `par_checkpoint.Checkpoints.check` tries them out."""
    given = options.checkpoint
    if given.copies and not given.tiers:
        raise UserError(
            f"checkpoint.copies is {given.copies}, but there are no checkpoint.tiers; give the memory of each host "
            "as the first one, such as /dev/shm/gpt, and one that outlives it"
        )
    if len(given.keep_last) not in (0, 1, len(given.tiers)) or min(given.keep_last, default=1) < 1:
        raise UserError(
            f"checkpoint.keep_last is {list(given.keep_last)} for {len(given.tiers)} tiers; give one number of 1 or "
            "more, or one for each tier"
        )


def _check_experts(options: Options, topology: Topology) -> None:
    """Check that the GPT's experts divide over the ranks."""
    model, is_dealt = options.model, EXPERTS in topology.views
    if is_dealt and not model.experts:
        raise UserError(
            f"parallel.expert deals experts out over {topology.size('expert_parallel')} ranks, but model.experts is 0; "
            "give their number, or give these ranks to data"
        )
    if not model.experts:
        return
    if model.top_k > model.experts:
        raise UserError(f"model.top_k is {model.top_k}, but model.experts is {model.experts}; choose at most as many")
    tensor = options.parallel.get("tensor")
    mode = tensor.get("mode") if isinstance(tensor, Mapping) else None
    if mode not in (None, "1d"):
        raise UserError(
            f"experts need tensor mode '1d' or none, and parallel.tensor.mode is {mode!r}; change it, or leave "
            "model.experts out"
        )
    ranks = topology.size("expert_parallel") if is_dealt else 1
    if model.experts % ranks:
        raise UserError(
            f"model.experts {model.experts} does not divide by {ranks} ranks of parallel.expert; use a multiple"
        )
    parts = topology.size("expert_tensor") if is_dealt else topology.size("tensor")
    if model.features % parts:
        raise UserError(
            f"model.expert_hidden {model.features} does not divide by the {parts} tensor ranks that an expert is cut "
            "over; use a multiple, or parallel.expert.tensor 1"
        )


def accelerator_count() -> int:
    """Return the number of accelerators whose tensors a backend of their own sends, such as NCCL or XCCL.

    The function imports torch, which is slow, only if the host has a driver of an accelerator.
    """
    has_driver = sys.platform != "linux" or any(Path(driver).exists() for driver in _DRIVERS)
    # A device that another wheel has registered with torch may need no driver.
    if not has_driver and "torch" not in sys.modules:
        return 0
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # gloo cannot reduce tensors of MPS, so a Mac trains on its CPU.
    if accelerator is None or dist.get_default_backend_for_device(accelerator) == "gloo":
        return 0
    return torch.accelerator.device_count()
