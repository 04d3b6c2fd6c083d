"""What the tests of existing models share: small models of many families, in fp64 throughout."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups, Topology
from par_layers import PartialGradientReducer, parallelization_of
from par_testing import assert_equal_to_one_device, once

VOCABULARY = 101  # divides by neither 2 nor 4
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 100,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "tied llama with biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 3.0}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "gpt2": ("GPT2", {**GPT2, "intermediate_size": None}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **EXPERTS}),
    "qwen3 with experts": (
        "Qwen3Moe",
        {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "mlp_only_layers": [0], **EXPERTS},
    ),
    "deepseek": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "bert": ("Bert", NO_DROPOUT),
}
"""By name: the beginning of the names of its classes, and what its config says beside `TEXT`."""

LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
LATENT = {
    **LATENT_ATTENTION,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPTJ", {"rotary_dim": 4, "n_inner": 48}),
    "roberta": ("Roberta", NO_DROPOUT),
    "glm 4.7 flash": ("Glm4MoeLite", LATENT),
}
"""Families whose plans `compare` proves."""


MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", {}),
    "llama 4": (
        "Llama4",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "moe_layers": [1],
        },
    ),
    "qwen3 next": (
        "Qwen3Next",
        {
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "inkling": (
        "Inkling",
        {
            "head_dim": 8,
            "swa_head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "d_rel": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "gemma 3n": (
        "Gemma3n",
        {
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "intermediate_size": [48, 48],
            "activation_sparsity_pattern": [0.5, 0.0],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "sliding_window": 4,
        },
    ),
    "mimo v2": (
        "MiMoV2Flash",
        {
            "head_dim": 8,
            "v_head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "longcat": (
        "LongcatFlash",
        {
            **{key: size for key, size in LATENT.items() if not key.startswith(("n_group", "topk", "moe", "num_exp"))},
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
    ),
    "hy v4": (
        "HYV4",
        {
            **LATENT_ATTENTION,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 4,
        },
    ),
}
"""Families with parts that see several tokens without being cut, with outputs of another shape, with gathered heads."""

OF_EXPERTS = {
    "gpt-oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4, **EXPERTS}),
}
"""Families that have a plan for experts that are dealt out, and none for tensor ranks."""


def make(family: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A small model, the same on every rank; every parameter is drawn, biases and norms too."""
    transformers = pytest.importorskip("transformers", minversion="5.4")
    stem, own = {**FAMILIES, **FURTHER, **MIXED, **OF_EXPERTS}[family]
    of_text = stem in ("Gemma3", "Gemma3n", "Llama4", "Inkling")
    config_class = getattr(transformers, f"{stem}TextConfig" if of_text else f"{stem}Config")
    model_class = getattr(transformers, f"{stem}ForMaskedLM" if stem in ("Bert", "Roberta") else _causal(stem))
    config = config_class(**{**TEXT, **own, **options})
    config._experts_implementation = "eager"  # the grouped product has no fp64
    torch.manual_seed(0)
    model = model_class(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.to(dtype)
    for module in model.modules():
        for name in [name for name in module._buffers if "inv_freq" in name]:
            wide = module._buffers[name]
            module._buffers[name] = torch.empty_like(wide, dtype=torch.float32).copy_(
                wide
            )  # as transformers keeps them
    return model


def _causal(stem: str) -> str:
    return "GPT2LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM"


def tensor(**options: Any) -> dict[str, Any]:
    """The tensor axis over the whole world, in mode 1d; two heads of keys and values, if there are more ranks."""
    world = dist.get_world_size()
    copied = {"kv_heads": 2} if world > 2 else {}
    return {"size": world, "mode": "1d", **copied, **options}


def live(**options: Any) -> ProcessGroups:
    """Groups with all ranks on the tensor axis."""
    world = dist.get_world_size()
    return ProcessGroups(Topology.from_config({"tensor": tensor(**options)}, world))


def tokens(seed: int = 1, length: int = 8, batch: int = 2) -> Tensor:
    """Ids, the same on every rank."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def labels(seed: int) -> Tensor:
    """Labels for `tokens()`, some of them ignored."""
    targets = tokens(seed)
    targets[0, :3] = -100
    return targets


SEEDS = (2, 3)
"""Of the labels of two backwards."""


def _two_backwards(whole: Any, **options: Any) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor | None]]:
    """The losses and logits of a model on one device, and its gradients after both."""
    outputs = [whole(input_ids=tokens(), labels=labels(seed), **options) for seed in SEEDS]
    for each in outputs:
        each.loss.backward()
    found = [(each.loss.detach(), each.logits.detach()) for each in outputs]
    return found, [parameter.grad for parameter in whole.parameters()]


def assert_steps_equal(whole: Any, cut: Any, groups: ProcessGroups, exact: float = 1e-10, **options: Any) -> None:
    """Logits and losses of two backwards with different labels, the gradients after both, the weights after a step.

    Args:
        whole: The model on one device.
        cut: The same, cut.
        groups: The live groups.
        exact: The tolerance, absolute and relative: sums are in another order.
        **options: What forward takes beside ids and labels.
    """
    known = parallelization_of(cut)
    assert known is not None
    outputs, gradients = once(_two_backwards, whole, **options)
    for parameter, gradient in zip(whole.parameters(), gradients, strict=True):
        parameter.grad = gradient
    for seed, (loss, logits) in zip(SEEDS, outputs, strict=True):
        parallel = cut(input_ids=tokens(), labels=labels(seed), **options)
        close(parallel.loss, loss, exact)
        close(known.gather(parallel.logits), logits, exact)
        parallel.loss.backward()
    PartialGradientReducer(cut, groups).handle_gradient()
    reason = "fp64 sums in another order"
    assert_equal_to_one_device(cut, whole, gradients=True, rtol=exact, atol=exact, reason=reason)
    for model in (whole, cut):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    assert_equal_to_one_device(cut, whole, rtol=exact, atol=exact, reason=reason)


def close(here: Tensor, there: Tensor, exact: float = 1e-10) -> None:
    """They are equal but for the order of sums."""
    torch.testing.assert_close(here, there, rtol=exact, atol=exact)


class Mlp(nn.Module):
    """A pair of linears that knows nothing of ranks."""

    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))
