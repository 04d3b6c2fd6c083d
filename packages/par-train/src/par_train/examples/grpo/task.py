"""The task of the example: sums of two digits, samples, and a tiny model that answers."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HEADS = 4
ANSWER = 2  # digits of a sum, with a leading zero
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def write_model(folder: Path, base: int) -> None:
    """Write the config of a tiny Llama whose tokens are the digits of a base, "+" and "=".

    Raises:
        ValueError: The folder has another config.
    """
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocabulary": DIGITS[:base] + "+=",
        "vocab_size": base + 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 16,
        "initializer_range": 0.1,  # with the usual 0.02, rewards need three times as many steps to rise
    }
    path = folder / "config.json"
    if path.exists() and json.loads(path.read_text()) != config:
        raise ValueError(f"base={base}: {path} is of another model; pass another folder, or the base of that run")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2))


def read_vocabulary(folder: Path) -> str:
    """Return the characters of a model's tokens.

    Raises:
        ValueError: The folder has no model of this example.
    """
    path = folder / "config.json"
    vocabulary = json.loads(path.read_text()).get("vocabulary") if path.exists() else None
    if vocabulary is None:
        raise ValueError(f"model={folder}: no config.json with a vocabulary; pass the trainer's folder model")
    return str(vocabulary)


def draw_prompts(count: int, base: int, seed: int) -> Tensor:
    """Draw prompts such as "7+8=", int64 [count, 4]. A token is its digit; "+" is `base`, and "=" is `base + 1`."""
    left, right = torch.randint(base, (2, count), generator=torch.Generator().manual_seed(seed))
    plus = torch.full((count,), base)
    return torch.stack([left, plus, right, plus + 1], 1)


def rewards_of(tokens: Tensor, base: int) -> Tensor:
    """Return the fraction of correct digits in each answer, fp32 [...], for prompts with answers, [..., 6]."""
    total = tokens[..., 0] + tokens[..., 2]
    correct = torch.stack([total // base, total % base], -1)
    return (tokens[..., -ANSWER:] == correct).float().mean(-1)


def answer_logprobs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each digit of the answers, [rows, 2], for prompts with answers, [rows, 6].

    Trainer and generators compute it by the same code, so that their ratio is 1 where their weights are equal.
    """
    outputs: Any = model(input_ids=tokens[:, :-1], use_cache=False)
    logprobs: Tensor = outputs.logits[:, -ANSWER:].log_softmax(-1)
    return logprobs.gather(-1, tokens[:, -ANSWER:, None]).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Sampled answers, which carry the version that sampled them.

    Args:
        version: Number of the version.
        tokens: Prompts with answers, int64 [prompts, samples, 6]: a group of answers for each prompt.
        logprobs: Log-probabilities of the answers' digits under the version, fp32 [prompts, samples, 2].
    """

    version: int
    tokens: Tensor
    logprobs: Tensor

    def to_bytes(self) -> bytes:
        """Return the batch as a message."""
        # torch.load with weights_only runs no code of the sender, as a pickle would.
        file = io.BytesIO()
        torch.save(vars(self), file)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, message: bytes) -> "Samples":
        """Return the batch of a message."""
        return cls(**torch.load(io.BytesIO(message), weights_only=True))
