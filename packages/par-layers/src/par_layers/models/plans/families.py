"""Plans of families that have none of their own, or one that gathers what can stay cut. Data only."""

from typing import Any

from .plans import Plan, register_plan
from .styles import ColumnParallel, ExpertTensorParallel, PartialGradient, RowParallel


@register_plan("gpt2")
def _gpt2(config: Any) -> Plan:
    unit = config.hidden_size // config.num_attention_heads
    # c_attn holds queries, keys and values one after the other, and each of the three is split by heads.
    return {
        "h.*.attn.c_attn": ColumnParallel(blocks=3, unit=unit),
        "h.*.attn.c_proj": RowParallel(),
        "h.*.mlp.c_fc": ColumnParallel(),
        "h.*.mlp.c_proj": RowParallel(),
    }


@register_plan("gptj")
def _gptj(config: Any) -> Plan:
    unit = config.hidden_size // config.num_attention_heads
    return {
        **{f"h.*.attn.{name}": ColumnParallel(unit=unit) for name in ("q_proj", "k_proj", "v_proj")},
        "h.*.attn.out_proj": RowParallel(),
        "h.*.mlp.fc_in": ColumnParallel(),
        "h.*.mlp.fc_out": RowParallel(),
    }


@register_plan("bert")
@register_plan("roberta")
def _bert(config: Any) -> Plan:
    unit = config.hidden_size // config.num_attention_heads
    attention = "encoder.layer.*.attention"
    return {
        **{f"{attention}.self.{name}": ColumnParallel(unit=unit) for name in ("query", "key", "value")},
        f"{attention}.output.dense": RowParallel(),
        "encoder.layer.*.intermediate.dense": ColumnParallel(),
        "encoder.layer.*.output.dense": RowParallel(),
    }


@register_plan("phi3")
def _phi3(config: Any) -> Plan:
    """Return the plan of Phi-3: fused weights, each part sharded separately.

    Transformers' own plan gathers after both weights.
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return {
        "layers.*.self_attn.qkv_proj": ColumnParallel(blocks=(queries, keys, keys), unit=head),
        "layers.*.self_attn.o_proj": RowParallel(),
        "layers.*.mlp.gate_up_proj": ColumnParallel(blocks=2),
        "layers.*.mlp.down_proj": RowParallel(),
    }


@register_plan("deepseek_v3")
def _deepseek_v3(config: Any) -> Plan:
    """Return the plan of DeepSeek-V3: latent attention, sharded by heads behind its low-rank projections.

    Transformers' own plan replicates it.
    """
    nope, rope, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    attention = "layers.*.self_attn"
    queries = ColumnParallel(unit=nope + rope)
    before = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    # Without a low rank for queries, the model has one projection `q_proj` with heads.
    low_rank = before if config.q_lora_rank is not None else before[2:]
    mlp = {"gate_proj": ColumnParallel(), "up_proj": ColumnParallel(), "down_proj": RowParallel()}
    return {
        # These are replicated before the Columns, and the gradient that comes back from the Columns is a partial sum.
        **{f"{attention}.{name}": PartialGradient(before=True) for name in low_rank},
        f"{attention}.{'q_b_proj' if config.q_lora_rank is not None else 'q_proj'}": queries,
        f"{attention}.kv_b_proj": ColumnParallel(unit=nope + values),
        f"{attention}.o_proj": RowParallel(),
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": ExpertTensorParallel(),
        **{f"layers.*.mlp.shared_experts.{name}": style for name, style in mlp.items()},
        **{f"layers.*.mlp.{name}": style for name, style in mlp.items()},
    }
