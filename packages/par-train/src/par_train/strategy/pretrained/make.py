"""A folder that transformers writes becomes this rank's part of a model."""

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from par_checkpoint import Format, load
from par_groups import together
from par_layers import initialize_transformers_, parallelize
from par_pipeline import build_model_stages

from ..._disk import config_file
from ..setup import Setup
from .adapters import base_name, fill_adapters_, put_around_
from .causal import PathLike, Plan, sees_later_tokens
from .sequence import attend_over_, check_pretrained


def make_part(
    strategy: Setup,
    path: PathLike,
    *,
    plan: Plan,
    dtype: str | torch.dtype,
    adapter: Any,
    attention: str | None,
    weights: bool,
) -> nn.Module:
    """Makes this rank's part of a causal language model; see `Strategy.from_pretrained`. Collective."""
    groups, schedule = strategy.groups, strategy.schedule
    context, tensor_ranks = strategy.context, groups.size("tensor")
    with together("the model", None):
        if attention is not None and context.ranks > 1:
            raise ValueError(
                f"attention is {attention!r}, but over sequence={context.ranks} the attention is that of "
                "Strategy.context; leave attention out"
            )
        model = make_on_meta(os.fspath(path), dtype, attention)
        twin = None if weights else make_on_meta(os.fspath(path), dtype, attention)
        if adapter is not None:
            put_around_(model, adapter)
        check_pretrained(model, context, tensor_ranks=tensor_ranks, trained=False)
        attend_over_(model, context)
    if tensor_ranks > 1 or strategy.deals_experts:
        parallelize(model, groups, plan)
    part: nn.Module = model
    if schedule is not None:
        with together("the stages", None):
            part = build_model_stages(model, schedule, groups.rank("pipeline"), strategy.sequence_ranks)
    seed, device = strategy.options.seed, strategy.device
    if adapter is not None:
        fill_adapters_(part, adapter, seed, device)
    if twin is not None:
        with together("drawing weights", None):
            initialize_transformers_(part, twin, seed, device)
    elif adapter is None:
        load(path, model=part, device=device, dtype=(model.dtype, torch.float32))
    else:
        _load_base(path, part, device, (model.dtype, torch.float32))
    return part.to(device)


def make_on_meta(path: str, dtype: str | torch.dtype, attention: str | None) -> Any:
    """A causal language model without memory, as the config in a folder describes it.

    Args:
        path: A folder with config.json.
        dtype: The dtype of its weights; "auto": the config's.
        attention: The name of transformers' attention, such as "sdpa"; None: its default.

    Raises:
        ImportError: transformers is not installed.
        ValueError: The folder has no config.
    """
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ImportError(
            "from_pretrained() makes models of transformers, which is not installed; pip install transformers jinja2"
        ) from None
    config_file(Path(path), repr(path))
    config = transformers.AutoConfig.from_pretrained(path)
    chosen = {} if attention is None else {"attn_implementation": attention}
    own = config.dtype or torch.float32 if dtype == "auto" else dtype
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=own, **chosen)
    _widen_(model, own)
    if (name := sees_later_tokens(model)) is not None:
        made = " ".join(getattr(config, "architectures", None) or []) or config.model_type
        raise ValueError(
            f"{path!r} holds {made}: {name!r} of a {type(model).__name__} made from it lets each token attend to later "
            "tokens, so a causal loss would be meaningless; set is_decoder=True in its config.json to train a decoder, "
            "or load it with transformers, pass the model to initialize(), and use a criterion of your own"
        )
    if Path(path, "generation_config.json").is_file():  # which tokens end a text, among others
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model.eval()  # as transformers' own from_pretrained gives it


def _widen_(model: Any, dtype: Any) -> None:
    """Makes fp32 what transformers keeps so when it loads a model in half precision, such as biases of routers.

    Args:
        model: The model, on the meta device.
        dtype: The dtype that it was asked for.
    """
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype in (torch.float16, "float16"):
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    elif dtype not in (torch.bfloat16, "bfloat16"):
        return
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]  # as transformers reads them
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                full = f"{path}.{name}" if path else name
                if tensor is None or not tensor.is_floating_point() or not any(each.search(full) for each in kept):
                    continue
                wide = tensor.detach().float()
                tensors[name] = nn.Parameter(wide, tensor.requires_grad) if tensors is module._parameters else wide


def _load_base(path: PathLike, part: nn.Module, device: torch.device, dtype: tuple[torch.dtype, ...]) -> None:
    """Reads what lies within adapters, which the files know nothing of.

    Raises:
        ValueError: The files lack a tensor, or have one that the model has no place for; on every rank.
    """
    report = load(path, model=part, strict=False, device=device, dtype=dtype, format=Format(names=base_name))
    missing = [name for name in report.missing if ".lora_" not in name]
    if missing or report.unexpected or report.mismatched:
        problems = [
            *(f"missing: {name}" for name in missing),
            *(f"not wanted by anybody: {name}" for name in report.unexpected),
            *report.mismatched,
        ]
        raise ValueError(f"{os.fspath(path)!r} does not fit its config: {'; '.join(problems[:5])}; give a whole folder")
