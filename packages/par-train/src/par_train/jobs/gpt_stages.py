"""The GPT of the main job as pipeline stages."""

import torch
from torch import Tensor, nn

from par_layers import LayerSet, Tokens
from par_pipeline import Schedule, partition

from ..strategy.stages import Stages
from .gpt import GPT
from .options import ModelOptions


class Part(nn.Module):
    """A run of a GPT's blocks, with the embeddings before the first and the classifier behind the last.

    Args:
        model: What this rank has of the GPT; not a child, so that its other parts are not this one's.
        run: The range of blocks.
    """

    def __init__(self, model: GPT, run: range) -> None:
        super().__init__()
        self.own = nn.ModuleList(model.modules_of(run))
        self.run = run
        self.__dict__["model"] = model

    def forward(self, given: Tensor, tokens: Tokens | None = None, mask: Tensor | None = None) -> Tensor:
        """Bytes or hidden states to hidden states or logits; `tokens` and `mask` as the whole model's."""
        output: Tensor = self.__dict__["model"](given, self.run, tokens=tokens, mask=mask)
        return output


def gpt_stages(
    options: ModelOptions, layers: LayerSet, schedule: Schedule, rank: int, *, seed: int, device: torch.device
) -> tuple[GPT, Stages]:
    """What a pipeline rank has of a GPT, as one model and as stages.

    Args:
        options: Sizes of the whole GPT.
        layers: The layer set of the tensor mode.
        schedule: Says which stages the rank has.
        rank: In the pipeline.
        seed: Seed of the weights.
        device: Where they lie.
    """
    cuts = partition(options.layers, schedule.stages)
    runs = [cuts[stage] for stage in schedule.stage_of(rank)]
    model = GPT(options, layers, seed=seed, device=device, parts=runs)
    parts = {stage: Part(model, run) for stage, run in zip(schedule.stage_of(rank), runs, strict=True)}
    tied = {"tokens.weight": model.tokens.weight} if hasattr(model, "tokens") else {}
    return model, Stages(parts, dict(model.named_children()), [tied] if options.tied else [])
