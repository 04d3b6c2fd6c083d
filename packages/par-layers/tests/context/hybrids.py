"""Small hybrid models: recurrent layers next to attention, the same on every rank."""

import torch
import transformers
from torch.nn import functional

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
    "mamba_expand": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

MODELS = {
    "Qwen3Next": lambda: {**SIZES, **DELTA, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 24},
    "Bamba": lambda: {**SIZES, **MAMBA, "attn_layer_indices": [1], "z_loss_coefficient": 0.0},
    "Qwen3_5": lambda: {**SIZES, **DELTA, "head_dim": 8},
    "OlmoHybrid": lambda: {**SIZES, **DELTA},
    "FalconH1": lambda: {**SIZES, **MAMBA, "mamba_d_ssm": 64},
    "GraniteMoeHybrid": lambda: {
        **SIZES,
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "Zamba2": lambda: {
        **SIZES,
        "num_key_value_heads": 4,
        "mamba_d_state": 4,
        "mamba_ngroups": 2,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "chunk_size": 4,
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
    },
    "NemotronH": lambda: {
        **SIZES,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 2,
        "chunk_size": 4,
        "expand": 2,
        "layers_block_type": ["mamba", "attention"],
    },
    "Lfm2": lambda: {**SIZES, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "MiniMax": lambda: {
        **SIZES,
        "num_local_experts": 2,
        "block_size": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
"""Small hybrids: gated delta nets, Mamba-2, short convolutions, lightning attention, each beside attention."""

TEXT = {"Qwen3_5"}
"""Families whose configuration of the text model has a name of its own."""

DOCUMENTS = [[24], [5, 1, 12, 6]]
"""Of two rows. On two ranks the third document of the second row covers both, on four the first row covers all."""


def made(name):
    """A model whose parameters are the same on every rank, in float64."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}{'Text' * (name in TEXT)}Config")(**MODELS[name]())
    config._experts_implementation = "eager"  # the others have no float64
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
    for module in model.modules():  # decays are computed in float32, in other ways for one token and for several
        if hasattr(module, "decay_factors"):
            module.slope_rate = module.slope_rate.double()
            decays = module.decay_factors(module.slope_rate)
            module.query_decay, module.key_decay, module.diagonal_decay = decays
    return model


def batch_of(length=24):
    return torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(1))


def loss_of_documents(model, ids, documents):
    """The mean loss of one process that computes each document by itself."""
    total, count = 0.0, 0
    for row, lengths in enumerate(documents):
        for part in ids[row].split(lengths):
            logits = model(input_ids=part[None], use_cache=False).logits[0, :-1]
            total = total + functional.cross_entropy(logits, part[1:], reduction="sum")
            count += len(part) - 1
    return total / count
