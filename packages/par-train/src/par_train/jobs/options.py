"""Every flag of `par-train run`, `plan` and `render`, and every key of a config file: declared here, once.

A field of `Options` or of one of its tables is a key of a config file and a flag, such as `train.steps` and
`--train.steps`; a field of `PlanOptions` or `RenderOptions` is a flag of `par-train plan` or `par-train render` alone.
Pure records: `config` fills and checks them.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from par_data import Packing
from par_plan import ExpertLayers, Machine, OffloadTiers, Shape

from ..config.kinds import BYTES, SOURCES
from ..config.settings import FlagsAlone, option
from ..run.files import RunFiles


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What to train on: a folder of text for the byte-level GPT, one file for a model of transformers."""

    folder: str = option("", "GPT: folder of text; left empty, the Python standard library's own sources")
    patterns: tuple[str, ...] = option((), "GPT: file names to take, such as *.py,*.md; left empty, every text file")
    validation_fraction: float = option(0.05, "part of the bytes, or documents, that is held out", low=0.0001, high=0.9)
    validation_windows: int = option(
        128, "held-out windows, or rows, that a validation loss is taken of; all of them if there are fewer", low=1
    )
    path: str = option(
        "",
        "with model.path: what to train on: a file of text, JSON lines or conversations, a table (.parquet, .arrow), a "
        "folder of these, or a pattern such as data/train-*.parquet",
    )
    sources: tuple[Mapping[str, Any], ...] = option(
        (),
        "with model.path, in the place of data.path: several, each with a path and a weight, its part of the rows: "
        '[{path = "web.parquet", weight = 3}, {path = "chats.jsonl", weight = 1}]; format and field as in data',
        kind=SOURCES,
    )
    format: Literal["auto", "text", "jsonl", "chat"] = option(
        "auto", "with model.path: what a line of the file is; auto: a .jsonl or .json file's first line tells"
    )
    field: str = option("text", "with model.path: the key of the text in a line of JSON")
    template: str = option("", "with model.path: file with a chat template; left empty, the tokenizer's own")
    packing: Literal["auto", "whole", "stream"] = option(
        "auto",
        "whole keeps a document in one row, stream fills rows and cuts documents; auto: whole with model.path, and for "
        "the GPT windows that know of no documents",
    )
    documents: Literal["files", "paragraphs"] = option(
        "files", "GPT with data.packing: what a document is; paragraphs end at empty lines"
    )
    context: int | Literal["auto"] = option(
        "auto", "with model.path: tokens in a row; auto: 1024, or as many as the model has positions for", low=2
    )

    @property
    def rows(self) -> Packing:
        """How documents are packed into rows, where they are: always with a model of transformers."""
        return "whole" if self.packing == "auto" else self.packing


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The sizes of the byte-level GPT, or else the folder of a model of transformers and how it is made from it."""

    width: int = option(128, "GPT: width of the residual stream", low=1)
    layers: int = option(4, "GPT: transformer blocks", low=1)
    heads: int = option(4, "GPT: attention heads; they divide the width", low=1)
    context: int = option(128, "GPT: bytes that a prediction can look back on, the window length", low=1)
    tied: bool = option(False, "GPT: one table for the embedding of bytes and their classifier")
    experts: int = option(0, "GPT: experts in the place of each block's MLP; 0: none", low=0)
    top_k: int = option(2, "GPT with experts: how many of them a byte goes to", low=1)
    expert_hidden: int | Literal["auto"] = option(
        "auto", "GPT with experts: features inside an expert; auto: four times the width, as in an MLP", low=1
    )
    shared: int = option(0, "GPT with experts: further ones that every byte goes to", low=0)
    score: Literal["softmax", "sigmoid"] = option(
        "softmax", "GPT with experts: how a router's logits become scores, over all experts or each by itself"
    )
    aux: float = option(
        0.01, "GPT with experts: coefficient of the loss that keeps them equally busy, over each window; 0: none", low=0
    )
    z: float = option(0.0, "GPT with experts: coefficient of the loss that keeps routers' logits small", low=0)
    bias_rate: float = option(
        0.0,
        "GPT with experts: what a step adds to the bias by which idle ones are chosen, and takes from busy ones'; 0: "
        "there is no bias",
        low=0,
    )
    capacity: float = option(
        0.0,
        "GPT with experts: rows that one takes of each rank, by the mean, such as 1.25; those beyond are dropped; 0: "
        "none is",
        low=0,
    )
    path: str = option("", "train a model of transformers: folder with its config, weights and tokenizer")
    config: str = option("", "the same from random weights: folder with a config and a tokenizer")
    attention: str = option("", "with model.path: transformers' attention, such as sdpa; left empty, its default")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "with model.path: of the weights before precision; auto: float32, or the folder's if precision has it"
    )

    @property
    def folder(self) -> str:
        """The folder of the model of transformers, with weights or without; "" for the byte-level GPT."""
        return self.path or self.config

    @property
    def features(self) -> int:
        """The features inside an MLP, or an expert."""
        return 4 * self.width if self.expert_hidden == "auto" else self.expert_hidden

    @property
    def shape(self) -> Shape:
        """The sizes of the byte-level GPT, as the planner takes them."""
        experts = None
        if self.experts:
            experts = ExpertLayers(
                number=self.experts, top_k=self.top_k, hidden=self.features, shared=self.shared, gated=False
            )
        return Shape(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            context=self.context,
            tied=self.tied,
            vocabulary=256,
            experts=experts,
        )


OF_EXPERTS = ("top_k", "expert_hidden", "shared", "score", "aux", "z", "bias_rate", "capacity")
"""The keys of `model` that say something of experts, where there are some."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How long to train, and how fast."""

    steps: int = option(800, "optimizer steps", low=1)
    batch_size: int = option(32, "windows, or rows, a step over all ranks together, whatever their number", low=1)
    learning_rate: float | Literal["auto"] = option(
        "auto",
        "peak learning rate of AdamW; auto: 4e-3 for the GPT, 2e-5 with model.path, 3e-4 with model.config, 2e-4 for "
        "an adapter",
        low=0,
    )
    final_learning_rate: float = option(0.05, "part of the peak where the cosine ends", low=0, high=1)
    warmup_steps: int = option(50, "steps of linear warm-up", low=0)
    weight_decay: float = option(0.1, "decoupled weight decay, on matrices only", low=0)
    beta2: float = option(0.98, "decay of AdamW's second moment", low=0, high=0.999999)
    clip_norm: float = option(1.0, "gradients are scaled down to this norm", low=1e-12)
    validate_every: int = option(100, "steps between validations; the last step is always one", low=1)
    checkpoint_every: int = option(250, "steps between checkpoints; 0: only at the end", low=0)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Bytes of a rank in each tier: what has no room in one lies in the next, and layers keep what still has room."""

    device: float = option(0.0, "bytes of a device that may be taken, such as 80GB; 0: all of it", low=0, kind=BYTES)
    host: float = option(0.0, "bytes of its host for what the device has no room for; 0: none", low=0, kind=BYTES)
    disk: float = option(0.0, "bytes of a local disk for what the host has no room for; 0: none", low=0, kind=BYTES)
    path: str = option("", "folder on that disk; nothing is left in it")

    @property
    def budget(self) -> dict[str, Any] | None:
        """What `Strategy(memory=...)` takes; None where no device is limited."""
        if not self.device:
            return None
        return {"device": self.device, "host": self.host, "disk": self.disk, "path": self.path or None}


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """How the stages of a pipeline are run, where `parallel.pipeline` has a size."""

    schedule: str = option("1f1b", "which rank does what when; a name that par-pipeline knows, such as zb_v")
    microbatches: int = option(0, "pieces of each replica's batch; 0: two for each pipeline rank", low=0)


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """A low-rank adapter (LoRA) that is trained in the place of a model of transformers, whose weights stay."""

    rank: int = option(0, "with model.path: train an adapter of this rank, and not the model; 0: none", low=0)
    alpha: float | Literal["auto"] = option(
        "auto", "the adapter's output is scaled by alpha / rank; auto: twice the rank", above=0
    )
    targets: tuple[str, ...] = option((), "names of the linears that get it, such as q_proj,v_proj; left empty, all")
    dropout: float = option(0.0, "part of the adapter's input that is dropped", low=0, high=0.99)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Where checkpoints go, where they go to more than the output folder."""

    tiers: tuple[str, ...] = option(
        (),
        "folders or URLs of this run that get each checkpoint, the nearest first, such as "
        "/dev/shm/gpt,/nvme/gpt,s3://bucket/gpt: training waits for the first alone; the output folder may be one of "
        "them; left empty, the output folder has one checkpoint",
    )
    copies: int = option(
        0,
        "hosts on which each host's part of the first tier is kept, where that is memory of each host: 2 outlives the "
        "loss of one; 0: all hosts share the first tier",
        low=0,
    )
    keep_last: tuple[int, ...] = option(
        (), "newest checkpoints that stay: one number for all tiers, or one for each; left empty, the newest alone"
    )


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Texts that a model of transformers writes while it is trained, to be looked at."""

    prompts: tuple[str, ...] = option((), "with model.path: texts to go on from; what a user says, if data is chat")
    tokens: int = option(64, "tokens to write, at most", low=1)
    every: int = option(0, "steps between samples; 0: at each validation", low=0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run of `par-train run`: of the byte-level GPT, or of a model of transformers where `model.folder` names one.

    `parallel` is the topology's own grammar, and is handed on to `par_groups.Topology.from_config`.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"model.gradient_checkpointing": "recompute = 'layers'"}
    """Keys that earlier versions had, and what says the same now."""

    output: str = option(
        "",
        "folder for checkpoint, metrics and curve; left empty, runs/gpt, or runs/ and the name of the model's folder",
    )
    resume: Literal["no", "auto"] = option(
        "no", "auto: go on from the checkpoint in the output folder, if there is one"
    )
    overwrite: bool = option(False, "replace the run that the output folder holds; not together with resume")
    ranks: int | Literal["auto"] = option("auto", "processes to start here; auto: one a GPU, else 2", low=1)
    device: Literal["auto", "cpu"] = option("auto", "auto: GPUs if there are any")
    zero: int = option(
        0, "what replicas share: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too", low=0, high=3
    )
    precision: Literal["fp32", "tf32", "bf16", "bf16-amp", "fp16", "fp16-amp", "bf16-sr", "fp8"] = option(
        "fp32", "of weights and arithmetic; fp16 scales the loss, fp8 multiplies float8 numbers, -sr keeps no fp32 copy"
    )
    recompute: str = option(
        "",
        "what is computed again in backward and not kept: cheap (norms and activations), layers, layers:2 (every "
        "second), keep:0.4 or keep:6GB (as little as that allows); left empty, nothing",
    )
    seed: int = option(0, "seed of the weights and of the order of the data", low=0, high=2**63 - 1)
    gradient_handlers: tuple[Mapping[str, Any], ...] = option(
        (), 'what completes gradients before a step, such as [{type = "mine"}]; left empty, the usual ones'
    )
    trackers: tuple[str, ...] = option(
        (), "who gets each line of metrics, too: tensorboard, wandb (offline with WANDB_MODE=offline), mlflow"
    )
    diagnose: float = option(
        300.0, "seconds without progress after which one line names the rank that hangs; 0: no watchdog", low=0
    )
    goodput: bool = option(
        False, "write where time went into each line of metrics: data, steps, checkpoints, waiting for each axis"
    )
    peak_flops: float | Literal["auto"] = option(
        "auto", "peak operations a second of a device, for MFU; auto: of GPUs that are known", above=0
    )
    profile: str = option(
        "", "steps whose trace is written to trace.json for Perfetto, such as steps=10:15 (15 is not among them)"
    )
    plugins: tuple[str, ...] = option((), "steps of wiring to add, each as module:Name or a name that a wheel declares")
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    adapter: AdapterOptions = field(default_factory=AdapterOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    sample: SampleOptions = field(default_factory=SampleOptions)
    pipeline: ScheduleOptions = field(default_factory=ScheduleOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    parallel: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output_folder(self) -> str:
        """The output folder, as it was given, or the default one of this model."""
        name = Path(self.model.folder).expanduser().resolve().name if self.model.folder else "gpt"
        return self.output or f"runs/{name}"

    @property
    def files(self) -> RunFiles:
        """The files in the output folder."""
        return RunFiles(Path(self.output_folder).expanduser())

    @property
    def peak_learning_rate(self) -> float:
        """The largest learning rate of the run."""
        given = self.train.learning_rate
        if given != "auto":
            return given
        if self.adapter.rank:
            return 2e-4
        return 2e-5 if self.model.path else 3e-4 if self.model.config else 4e-3


@dataclass(frozen=True, kw_only=True)
class PlanOptions(FlagsAlone):
    """What `par-train plan` takes beside the options of a run: the machine to plan for, and what to print."""

    world: int = option(MISSING, "number of devices, such as 1024; needed", low=1)
    device_memory: float = option(MISSING, "memory of a device, such as 80GB or 80GiB; needed", above=0, kind=BYTES)
    top: int = option(10, "topologies to show, each with its best schedule and stage", low=1)
    sequence: int | Literal["auto"] = option(
        "auto", "ranks that each sequence is cut over in what is compared; 1: none is cut; auto: all that help", low=1
    )
    imbalance: float = option(
        1.0, "of experts: rows of the rank that has most of them, by the mean of those they are dealt out over", low=1
    )
    json: str = option("", "file to write all figures to")
    flops: float | Literal["auto"] = option(
        "auto",
        "peak operations a second of a device; auto: an H100's, 989e12, fp32 67e12, tf32 495e12, fp8 1979e12",
        above=0,
    )
    efficiency: float = option(Machine.efficiency, "part of the peak that the model reaches", above=0, high=1)
    bandwidth: float = option(Machine.bandwidth, "bytes a second into a device from its node", above=0, kind=BYTES)
    network: float = option(Machine.network, "bytes a second into a device from other nodes", above=0, kind=BYTES)
    latency: float = option(Machine.latency, "seconds that each operation takes before its first byte", above=0)
    devices_per_node: int = option(Machine.devices_per_node, "ranks that follow one another share a node", low=1)
    host_memory: float = option(
        OffloadTiers.host_memory,
        "memory of a node's host, for what devices have no room for; 0: none",
        low=0,
        kind=BYTES,
    )
    disk: float = option(
        OffloadTiers.disk, "room on a node's disk, for what the host has no room for", low=0, kind=BYTES
    )
    link: float = option(OffloadTiers.link, "bytes a second between a device and its host", above=0, kind=BYTES)
    host_step: float = option(
        OffloadTiers.host_step,
        "bytes a second that a host reads and writes in an optimizer's step",
        above=0,
        kind=BYTES,
    )
    disk_read: float = option(
        OffloadTiers.disk_read, "bytes a second that a node reads from its disk", above=0, kind=BYTES
    )
    disk_write: float = option(OffloadTiers.disk_write, "bytes a second that it writes there", above=0, kind=BYTES)


@dataclass(frozen=True, kw_only=True)
class RenderOptions(FlagsAlone):
    """What `par-train render` takes beside the options of a run: the cluster to write a file for."""

    world: int = option(MISSING, "number of ranks, one for each device, such as 64; needed", low=1)
    devices_per_node: int = option(Machine.devices_per_node, "ranks on a node", low=1)
    host_memory: float = option(0.0, "memory of a node that the job takes, such as 1TB; 0: all", low=0, kind=BYTES)
    cores: int = option(8, "processor cores for each rank", low=1)
    interface: str = option("", "network interface that ranks talk over, such as eth0; left empty, that of host names")
    name: str = option("", "name of the job; left empty, that of the output folder")
    minutes: int = option(240, "SLURM: minutes after which a job is ended, and has saved", low=1)
    warning: int = option(300, "seconds that ranks have to save and leave, once they are told", low=30)
    resumes: int = option(
        0, "SLURM: jobs of an array, of which each goes on where the last left; 0: one job, which is requeued", low=0
    )
    restarts: int = option(20, "Ray, Kubernetes: times that lost ranks are replaced", low=0)
    image: str = option("", "Kubernetes: container image that has par-train and torch; needed")
    claim: str = option("work", "Kubernetes: claim of the volume that all pods share, for data and output")
    file: str = option("", "file to write; left empty, it is printed")


def learning_rate(options: Options, step: int) -> float:
    """The learning rate of step 1, 2, ...: linear warm-up, then half a cosine down to its final part."""
    train, peak = options.train, options.peak_learning_rate
    if step <= train.warmup_steps:
        return peak * step / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (train.final_learning_rate + (1 - train.final_learning_rate) * cosine)
