"""Every flag of `par-train run`, `plan` and `render`, and every key of a config file: declared here, once.

A field of `Options` or of one of its tables is a key of a config file, such as `train.steps`, and a flag, such as
`--train.steps`. A field of `PlanOptions` or `RenderOptions` is only a flag of `par-train plan` or `par-train render`.
The classes are pure records. `config` fills and checks them.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

from par_data import Packing
from par_groups import LaneCounts
from par_plan import ExpertLayers, Machine, OffloadTiers, Shape

from ..config.kinds import BYTES, SOURCES
from ..config.settings import FlagsAlone, option
from ..run.files import RunFiles


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The training data: a folder of text for the byte-level GPT, files for a Hugging Face Transformers model."""

    folder: str = option("", "GPT: folder of text; default: the source files of the Python standard library")
    patterns: tuple[str, ...] = option((), "GPT: patterns of file names, such as *.py,*.md; default: every text file")
    validation_fraction: float = option(
        0.05, "fraction of the bytes or documents to hold out for validation", low=0.0001, high=0.9
    )
    validation_windows: int = option(
        128, "number of held-out windows or packed sequences in a validation loss, at most", low=1
    )
    path: str = option(
        "",
        "with model.path: file of text, JSON lines or conversations, table (.parquet, .arrow), folder of files, or "
        "pattern such as data/train-*.parquet",
    )
    sources: tuple[Mapping[str, Any], ...] = option(
        (),
        "with model.path, instead of data.path: paths with their weights in the mixture, such as "
        '[{path = "web.parquet", weight = 3}, {path = "chats.jsonl", weight = 1}]; each may set format and field',
        kind=SOURCES,
    )
    format: Literal["auto", "text", "jsonl", "chat"] = option(
        "auto", "with model.path: format of a line; auto: detect it from the first line of a .jsonl or .json file"
    )
    field: str = option("text", "with model.path: key of the text in a line of JSON")
    template: str = option("", "with model.path: file with a chat template; default: the tokenizer's template")
    packing: Literal["auto", "whole", "stream"] = option(
        "auto",
        "whole keeps a document in one packed sequence, stream splits documents to fill sequences; auto: whole with "
        "model.path, and windows that ignore documents for the GPT",
    )
    documents: Literal["files", "paragraphs"] = option(
        "files", "GPT with data.packing: unit that counts as a document; paragraphs end at empty lines"
    )
    context: int | Literal["auto"] = option(
        "auto",
        "with model.path: tokens in a packed sequence; auto: 1024, or the model's positions if they are fewer",
        low=2,
    )

    @property
    def rows(self) -> Packing:
        """The way documents are packed into sequences; a Hugging Face Transformers model always packs."""
        return "whole" if self.packing == "auto" else self.packing


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The sizes of the byte-level GPT, or the folder of a Hugging Face Transformers model and how to load it."""

    width: int = option(128, "GPT: width of the residual stream", low=1)
    layers: int = option(4, "GPT: number of transformer blocks", low=1)
    heads: int = option(4, "GPT: number of attention heads, which must divide the width", low=1)
    context: int = option(128, "GPT: window length in bytes", low=1)
    tied: bool = option(False, "GPT: tie the embedding and the output layer")
    experts: int = option(0, "GPT: number of experts that replace each block's MLP; 0: no experts", low=0)
    top_k: int = option(2, "GPT with experts: number of experts for each byte", low=1)
    expert_hidden: int | Literal["auto"] = option(
        "auto", "GPT with experts: hidden features of an expert; auto: four times the width, as in an MLP", low=1
    )
    shared: int = option(0, "GPT with experts: number of shared experts, which process every byte", low=0)
    score: Literal["softmax", "sigmoid"] = option(
        "softmax", "GPT with experts: function from a router's logits to routing weights"
    )
    aux: float = option(
        0.01, "GPT with experts: coefficient of the load-balancing loss of each window; 0: no such loss", low=0
    )
    z: float = option(0.0, "GPT with experts: coefficient of the z-loss, which keeps the routers' logits small", low=0)
    bias_rate: float = option(
        0.0,
        "GPT with experts: step size of the routing bias, which grows for idle and shrinks for busy experts; 0: "
        "no bias",
        low=0,
    )
    capacity: float = option(
        0.0,
        "GPT with experts: capacity of an expert for each rank's tokens, relative to the mean, such as 1.25; further "
        "tokens are dropped; 0: no limit",
        low=0,
    )
    path: str = option("", "folder of a Hugging Face Transformers model to train, with config, weights and tokenizer")
    config: str = option("", "folder with a config and a tokenizer, to train the model from random weights")
    attention: str = option(
        "", "with model.path: attention implementation of transformers, such as sdpa; default: that of transformers"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "with model.path: dtype of the loaded weights; auto: float32, or the folder's dtype if the precision uses it",
    )

    @property
    def folder(self) -> str:
        """The folder of the Hugging Face Transformers model, with or without weights; "" for the byte-level GPT."""
        return self.path or self.config

    @property
    def features(self) -> int:
        """The features inside an MLP, or an expert."""
        return 4 * self.width if self.expert_hidden == "auto" else self.expert_hidden

    @property
    def shape(self) -> Shape:
        """The sizes of the byte-level GPT for the planner."""
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
"""The keys of `model` that need experts."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The number of steps, the batch size, and the optimizer's settings."""

    steps: int = option(800, "number of optimizer steps", low=1)
    batch_size: int = option(32, "windows or packed sequences in a step, summed over all ranks", low=1)
    learning_rate: float | Literal["auto"] = option(
        "auto",
        "peak learning rate of AdamW; auto: 4e-3 for the GPT, 2e-5 with model.path, 3e-4 with model.config, 2e-4 for "
        "an adapter",
        low=0,
    )
    final_learning_rate: float = option(
        0.05, "final learning rate of the cosine, as a fraction of the peak", low=0, high=1
    )
    warmup_steps: int = option(50, "number of steps of linear warm-up", low=0)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", low=0)
    beta2: float = option(0.98, "decay of AdamW's second moment", low=0, high=0.999999)
    clip_norm: float = option(1.0, "maximum norm of all gradients", low=1e-12)
    validate_every: int = option(100, "steps between validations; the last step always validates", low=1)
    checkpoint_every: int = option(250, "steps between checkpoints; 0: only at the end", low=0)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Byte budgets of a rank for each memory tier. State above a budget is offloaded to the next, or recomputed."""

    device: float = option(0.0, "budget of a device in bytes, such as 80GB; 0: all of it", low=0, kind=BYTES)
    host: float = option(
        0.0, "budget of host memory in bytes, for state that does not fit on the device; 0: none", low=0, kind=BYTES
    )
    disk: float = option(
        0.0, "budget of a local disk in bytes, for state that does not fit in host memory; 0: none", low=0, kind=BYTES
    )
    path: str = option("", "folder on the local disk for offloaded state; it is empty after the run")

    @property
    def budget(self) -> dict[str, Any] | None:
        """The value for `Strategy(memory=...)`; None if no device is limited."""
        if not self.device:
            return None
        return {"device": self.device, "host": self.host, "disk": self.disk, "path": self.path or None}


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The schedule of a pipeline, if `parallel.pipeline` has a size."""

    schedule: str = option("1f1b", "name of a schedule of par-pipeline, such as zb_v")
    microbatches: int = option(
        0, "number of microbatches of each replica's batch; 0: two for each pipeline rank", low=0
    )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """A low-rank adapter (LoRA) to train instead of the weights of a Hugging Face Transformers model."""

    rank: int = option(0, "with model.path: rank of an adapter to train instead of the model; 0: no adapter", low=0)
    alpha: float | Literal["auto"] = option(
        "auto", "alpha, which scales the adapter's output by alpha / rank; auto: twice the rank", above=0
    )
    targets: tuple[str, ...] = option(
        (), "names of the linear layers with an adapter, such as q_proj,v_proj; default: all"
    )
    dropout: float = option(0.0, "dropout probability of the adapter's input", low=0, high=0.99)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The number of checkpoints to keep, and their storage tiers, if a run saves to more than the output folder."""

    tiers: tuple[str, ...] = option(
        (),
        "folders or URLs for each checkpoint of this run, the nearest first, such as "
        "/dev/shm/gpt,/nvme/gpt,s3://bucket/gpt; training waits only for the first; default: the output folder",
    )
    copies: int = option(
        0,
        "number of hosts that store each host's part of a first tier in host memory; 2 survives the loss of one host; "
        "0: all hosts share the first tier",
        low=0,
    )
    keep_last: tuple[int, ...] = option(
        (), "number of newest checkpoints to keep, for all tiers or for each tier; default: 1"
    )


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Texts that a Hugging Face Transformers model generates during training."""

    prompts: tuple[str, ...] = option(
        (), "with model.path: prompts to continue; messages of a user, if the data are conversations"
    )
    tokens: int = option(64, "maximum number of tokens to generate", low=1)
    every: int = option(0, "steps between samples; 0: at each validation", low=0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `par-train run`. It trains the Hugging Face Transformers model in `model.folder`, or a byte GPT.

    `par_groups.Topology.from_config` receives `parallel` and checks it.
    """

    output: str = option(
        "",
        "folder for checkpoints, metrics and curve; default: runs/gpt, or runs/ and the name of the model's folder",
    )
    resume: Literal["no", "auto"] = option("no", "auto: resume from the checkpoint in the output folder, if it has one")
    overwrite: bool = option(False, "replace the run in the output folder; not allowed with resume")
    ranks: int | Literal["auto"] = option(
        "auto", "number of processes to start on this host; auto: one for each GPU, or 2 without a GPU", low=1
    )
    device: Literal["auto", "cpu"] = option("auto", "auto: GPUs if the host has them")
    zero: int = option(
        0,
        "ZeRO stage: 1 shards the optimizer state over data ranks, 2 also gradients, 3 also parameters; 0: no sharding",
        low=0,
        high=3,
    )
    precision: Literal["fp32", "tf32", "bf16", "bf16-amp", "fp16", "fp16-amp", "bf16-sr", "fp8"] = option(
        "fp32",
        "dtype of weights and arithmetic; fp16 scales the loss, fp8 uses float8 matmuls, -sr has no master weights",
    )
    recompute: str = option(
        "",
        "activation checkpointing: cheap (norms and activation functions), layers, layers:2 (every second layer), "
        "keep:0.4 or keep:6GB (fewest recomputations within that budget); default: off",
    )
    numerics: Literal["ordinary", "canonical"] = option(
        "ordinary", "canonical: the same weights under every number of ranks that divides the lanes, to the last bit"
    )
    lanes: int = option(0, "with numerics canonical: number of microbatches of a step, over all data ranks", low=0)
    tensor_lanes: int = option(
        1, "with numerics canonical: number of blocks of each weight, over all tensor ranks, also on one", low=1
    )
    sequence_lanes: int = option(
        1, "with numerics canonical: number of chunks of each row, over all sequence ranks, also on one", low=1
    )
    seed: int = option(0, "seed of the weights and of the data order", low=0, high=2**63 - 1)
    gradient_handlers: tuple[Mapping[str, Any], ...] = option(
        (), 'gradient handlers that run before each step, such as [{type = "mine"}]; default: the built-in handlers'
    )
    trackers: tuple[str, ...] = option(
        (), "further receivers of metrics: tensorboard, wandb (offline with WANDB_MODE=offline), mlflow"
    )
    diagnose: float = option(
        300.0, "seconds without progress until one line names the rank that hangs; 0: no watchdog", low=0
    )
    goodput: bool = option(
        False, "add shares of time to each line of metrics: data, steps, checkpoints, waiting for each axis"
    )
    peak_flops: float | Literal["auto"] = option(
        "auto", "peak operations per second of a device, for MFU; auto: the value of a known GPU", above=0
    )
    profile: str = option(
        "", "range of steps to trace for Perfetto in trace.json, such as steps=10:15, which excludes 15"
    )
    plugins: tuple[str, ...] = option((), "plugins, each as module:Name or as a name that an installed wheel declares")
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
        """The folder for all output of the run: `output`, else `runs/<name of the model's folder>`, else `runs/gpt`."""
        name = Path(self.model.folder).expanduser().resolve().name if self.model.folder else "gpt"
        return self.output or f"runs/{name}"

    @property
    def files(self) -> RunFiles:
        """The files in the output folder."""
        return RunFiles(Path(self.output_folder).expanduser())

    @property
    def lane_counts(self) -> LaneCounts | None:
        """The numbers of lanes of canonical numerics; None for ordinary numerics."""
        if not self.lanes:
            return None
        return LaneCounts(data=self.lanes, tensor=self.tensor_lanes, sequence=self.sequence_lanes)

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
    """The further options of `par-train plan`: the machine to plan for, and the output."""

    world: int = option(MISSING, "number of devices, such as 1024; required", low=1)
    device_memory: float = option(MISSING, "memory of a device, such as 80GB or 80GiB; required", above=0, kind=BYTES)
    top: int = option(10, "number of topologies to print, each with its best schedule and ZeRO stage", low=1)
    sequence: int | Literal["auto"] = option(
        "auto", "ranks that split each sequence; 1: no split; auto: compare every size that helps", low=1
    )
    imbalance: float = option(
        1.0, "routed tokens of the busiest expert rank, divided by the mean over expert ranks", low=1
    )
    json: str = option("", "JSON file for all figures")
    flops: float | Literal["auto"] = option(
        "auto",
        "peak operations per second of a device; auto: an H100's 989e12, fp32 67e12, tf32 495e12, fp8 1979e12",
        above=0,
    )
    efficiency: float = option(Machine.efficiency, "fraction of the peak that the model reaches", above=0, high=1)
    bandwidth: float = option(Machine.bandwidth, "bytes per second into a device from its node", above=0, kind=BYTES)
    network: float = option(Machine.network, "bytes per second into a device from other nodes", above=0, kind=BYTES)
    latency: float = option(Machine.latency, "seconds that each operation takes before its first byte", above=0)
    devices_per_node: int = option(Machine.devices_per_node, "number of consecutive ranks on a node", low=1)
    host_memory: float = option(
        OffloadTiers.host_memory,
        "host memory of a node for offloaded state; 0: no offload",
        low=0,
        kind=BYTES,
    )
    disk: float = option(OffloadTiers.disk, "disk space of a node for offloaded state", low=0, kind=BYTES)
    link: float = option(OffloadTiers.link, "bytes per second between a device and its host", above=0, kind=BYTES)
    host_step: float = option(
        OffloadTiers.host_step,
        "bytes per second that a host reads and writes in an optimizer step",
        above=0,
        kind=BYTES,
    )
    disk_read: float = option(
        OffloadTiers.disk_read, "bytes per second that a node reads from its disk", above=0, kind=BYTES
    )
    disk_write: float = option(
        OffloadTiers.disk_write, "bytes per second that a node writes to its disk", above=0, kind=BYTES
    )


@dataclass(frozen=True, kw_only=True)
class RenderOptions(FlagsAlone):
    """The further options of `par-train render`: the cluster to write a file for."""

    world: int = option(MISSING, "number of ranks, one for each device, such as 64; required", low=1)
    devices_per_node: int = option(Machine.devices_per_node, "number of ranks on a node", low=1)
    host_memory: float = option(0.0, "memory of a node for the job, such as 1TB; 0: all", low=0, kind=BYTES)
    cores: int = option(8, "processor cores for each rank", low=1)
    interface: str = option(
        "", "network interface between ranks, such as eth0; default: the interface of the host name"
    )
    name: str = option("", "name of the job; default: the name of the output folder")
    minutes: int = option(240, "SLURM: time limit of a job in minutes, including its last save", low=1)
    warning: int = option(300, "seconds between the signal to leave and the end of a job", low=30)
    resumes: int = option(
        0,
        "SLURM: number of jobs in an array, each of which resumes the job before; 0: one job, which is requeued",
        low=0,
    )
    restarts: int = option(20, "Ray, Kubernetes: number of times that lost ranks are replaced", low=0)
    image: str = option("", "Kubernetes: container image with par-train and torch; required")
    claim: str = option("work", "Kubernetes: volume claim that all pods share, for data and output")
    file: str = option("", "file to write; default: standard output")


def learning_rate(options: Options, step: int) -> float:
    """Return the learning rate of step 1, 2, ...: linear warm-up, then half a cosine down to the final fraction."""
    train, peak = options.train, options.peak_learning_rate
    if step <= train.warmup_steps:
        return peak * step / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (train.final_learning_rate + (1 - train.final_learning_rate) * cosine)
