"""The sizes of a Llama that takes a step in no time, and can still be cut in every way."""

WORDS = 101
"""Tokens, which divide by no number of ranks."""

TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
