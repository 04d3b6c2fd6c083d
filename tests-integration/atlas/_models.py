"""A tiny random model of each type of Hugging Face Transformers that has a plan for tensor ranks.

The configuration is the type's own default with every size made small by the size's name. Layers of each kind that the
default has stay, each twice. `OWN` holds what the rules by name cannot guess.
"""

import re
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from par_layers.models.plans.plans import PLANS

VOCABULARY = 101  # divides by no number of ranks

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "n_positions": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "n_inner": 48,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 100,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    "image_size": 8,
    "patch_size": 4,
    "first_k_dense_replace": 2,
    "num_dense_layers": 2,
    "moe_layer_start_index": 2,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 4,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 4,
    "ssm_state_size": 4,
    "n_groups": 2,
    "chunk_size": 4,
    "keep_window_size": 4,
    "sliding_window_size": 4,
    "rel_extent": 8,
    "moe_hidden_size": 32,
    "zero_expert_num": 2,
    "share_expert_dim": 16,
    "block_size": 4,
    "embedding_rank": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_topk": 4,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "num_nextn_predict_layers": 0,
}
"""Values of entries by their names."""

BY_PATTERN: tuple[tuple[str, int], ...] = (
    (r"(?=.*(expert|moe)).*(intermediate_size|ffn_dim|ffn_hidden_size)", 16),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim).*", 48),
    (r"(num_local_experts|num_experts|n_routed_experts|moe_num_experts)", 4),
    (r".*vocab_size.*", VOCABULARY),
    (r".*_lora_rank", 8),
)
"""Values of integers whose names match, unless `SIZES` has them."""

LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
DROPOUT = r".*(drop|pdrop)(out|_prob|_rate|$).*|.*_pdrop|.*jitter.*|layerdrop"

MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
MROPE_HALF = {"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}

OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"linear_head_dim": 8, "linear_num_heads": 4, "num_expert_group": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 10000.0} for name in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_ocr2_text": {**MIXTURE, "mlp_layer_types": ["dense", "sparse"] * 2},
    "deepseek_v2": {**MIXTURE, "topk_method": "greedy"},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots1": {**MIXTURE, "n_group": 2, "first_k_dense_replace": 2},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_qk_rope_head_dim": 4,
        "swa_v_head_dim": 8,
    },
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [16, 16],
        "moe_num_experts": 4,
        "moe_k": 2,
    },
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "intermediate_size": [48] * 6,
        "activation_sparsity_pattern": [0.5, 0.0] * 3,
        "num_hidden_layers": 6,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "glm4v_moe_text": MROPE_HALF,
    "glm4v_text": MROPE_HALF,
    "glm5_next_text": {"num_key_value_heads": 4, "index_kpool": 2, "qk_rope_head_dim": 0, "qk_head_dim": 8},
    "glm_image_text": MROPE_HALF,
    "glm_ocr_text": MROPE_HALF,
    "gptj": {"rotary_dim": 4, "n_inner": 48},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        }
    },
    "neomme": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": MROPE,
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    "qwen2_vl_text": MROPE,
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 101,
        "make_ngram_vocab_size_divisible_by": 4,
        "split_ngram_parts": 2,
    },
    "step3p5": {"sliding_window": 4},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""Entries of a type's configuration that the rules above cannot guess."""


def types() -> list[str]:
    """Return the types whose configuration has a plan, or that have a plan of ours; in alphabetical order."""
    found = []
    for name in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[name]
        if getattr(kind, "base_model_tp_plan", None) or getattr(kind, "base_model_ep_plan", None) or name in PLANS:
            found.append(name)
    return sorted(set(found))


def tiny_config(name: str) -> Any:
    """Return the smallest configuration of a type that keeps each kind of layer, twice."""
    kind = CONFIG_MAPPING[name]
    given = _shrunk(kind(), OWN.get(name, {}))
    config = kind(**given)
    config._experts_implementation = "eager"  # the grouped matmul has no fp64
    config._attn_implementation = "eager"
    return config


def _shrunk(default: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Return small values for the entries of a default configuration, also of the configurations inside it."""
    entries = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    small: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, transformers.PretrainedConfig):
            small[name] = type(value)(**_shrunk(value, own.get(name, {})))
        elif re.fullmatch(DROPOUT, name) and isinstance(value, float):
            small[name] = 0.0
        elif name in SIZES and (value is not None or name == "head_dim"):
            small[name] = SIZES[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in BY_PATTERN if re.fullmatch(pattern, name)), None)
            if size is not None and value:
                small[name] = size
    if entries.get("qk_rope_head_dim"):  # latent attention: rotary tables have this width, each head its own key
        small["head_dim"] = SIZES["qk_rope_head_dim"]
        small["num_key_value_heads"] = SIZES["num_attention_heads"]
    rotary = entries.get("rope_parameters")
    if isinstance(rotary, dict) and "mrope_section" in rotary:  # pairs of features: for time, height and width
        small["rope_parameters"] = {**rotary, "mrope_section": [2, 1, 1]}
    small.update(_layers(entries))
    small.update((name, value) for name, value in own.items() if name not in small or not isinstance(value, dict))
    return small


def _layers(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the number of layers and the lists with an entry for each layer: each kind of layer twice."""
    counted = next((name for name in LAYERS if isinstance(entries.get(name), int)), None)
    if counted is None:
        return {}
    count = entries[counted]
    lists = {
        name: list(value) for name, value in entries.items() if isinstance(value, list | tuple) and len(value) == count
    }
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True))) if lists else []
    kinds = kinds[:4]
    layers = kinds * 2 if len(kinds) > 1 else kinds * 4
    found: dict[str, Any] = {name: [layer[index] for layer in layers] for index, name in enumerate(lists)}
    return {counted: len(layers) or 4, **found}


def class_of(config: Any) -> tuple[type[nn.Module], str]:
    """Return the class of a type's model, and its kind: causal, masked, or base, a model without a head."""
    for kind, mapping in (
        ("causal", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING),
        ("masked", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING),
        ("base", modeling_auto.MODEL_MAPPING),
    ):
        try:
            found = mapping[type(config)]
        except (KeyError, ValueError):  # a mapping names classes that a release lacks
            continue
        return (found[0] if isinstance(found, tuple) else found), kind
    # Parts of larger models have no entry: the text model inside a model with eyes.
    modeling = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    owners = [
        each
        for each in vars(modeling).values()
        if isinstance(each, type)
        and issubclass(each, transformers.PreTrainedModel)
        and each.__module__ == modeling.__name__
        and each.__dict__.get("config_class", each.__annotations__.get("config")) is type(config)
        and not each.__name__.endswith("PreTrainedModel")
    ]
    if not owners:
        raise LookupError(f"transformers has no model for {type(config).__name__}")
    causal = [each for each in owners if each.__name__.endswith("ForCausalLM")]
    return (causal or sorted(owners, key=lambda each: len(each.__name__)))[0], "causal" if causal else "base"


def make(name: str) -> Any:
    """Return the model of a type, in fp64; every parameter is random, also biases and norms."""
    config = tiny_config(name)
    torch.manual_seed(0)
    model = class_of(config)[0](config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.to(torch.float64)
    for module in model.modules():
        for key in [key for key in module._buffers if "inv_freq" in key]:
            wide = module._buffers[key]
            module._buffers[key] = torch.empty_like(wide, dtype=torch.float32).copy_(wide)  # as transformers keeps it
        # Lightning attention decays by one buffer for each token and by others for a block. Rounded to fp32, they
        # differ by 1e-8.
        if hasattr(module, "decay_factors"):
            module.slope_rate = module.get_slope_rate().double()
            decays = module.decay_factors(module.slope_rate)
            module.query_decay, module.key_decay, module.diagonal_decay = decays
    return model
