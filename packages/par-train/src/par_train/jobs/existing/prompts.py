"""Prompts as tokens, and their continuations as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from par_data import load_tokenizer

from ..._errors import UserError, as_user_error
from ..options import Options
from .folder import ModelFolder, positions_of


class Prompts:
    """The prompts of `sample.prompts` by the model's tokenizer.

    Args:
        options: Options of the run.
        folder: Folder of the model.
        is_chat: Whether the model trains on conversations, so that a prompt is a user's message.

    Attributes:
        tokens: The ids of each prompt, int64 [time].

    Raises:
        UserError: A prompt has no tokens, or is too long for the model's positions.
    """

    def __init__(self, options: Options, folder: ModelFolder, *, is_chat: bool) -> None:
        self._texts = options.sample.prompts
        with as_user_error():
            self._tokenizer: Any = load_tokenizer(folder.path) if self._texts else None
        template = options.data.template
        self._template = Path(template).expanduser().read_text(encoding="utf-8") if template else None
        self.tokens = [self._encoded(text, chat=is_chat) for text in self._texts]
        positions, new = positions_of(folder.config), options.sample.tokens
        for text, ids in zip(self._texts, self.tokens, strict=True):
            if not len(ids):
                raise UserError(f"sample.prompts has {text!r}, of which the tokenizer makes no token; give a text")
            if positions is not None and len(ids) + new > positions:
                raise UserError(
                    f"sample.prompts has {text!r:.60} of {len(ids)} tokens, which with sample.tokens {new} are more "
                    f"than the model's {positions} positions; shorten one of them"
                )

    def _encoded(self, text: str, *, chat: bool) -> Tensor:
        if chat:
            said = [{"role": "user", "content": text}]
            encoded = self._tokenizer.apply_chat_template(
                said, chat_template=self._template, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        else:
            encoded = self._tokenizer(text)
        ids = list(encoded["input_ids"])
        if not chat and len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id:
            ids.pop()  # some tokenizers end each text, but the model continues this one
        return torch.tensor(ids, dtype=torch.int64)

    def written(self, texts: Sequence[Tensor]) -> list[dict[str, str]]:
        """Return each prompt and its continuation, as "prompt" and "text".

        Args:
            texts: The ids of each prompt and its continuation, int64 [time].
        """
        behind = [ids[len(prompt) :].tolist() for prompt, ids in zip(self.tokens, texts, strict=True)]
        return [
            {"prompt": prompt, "text": self._tokenizer.decode(ids, skip_special_tokens=True)}
            for prompt, ids in zip(self._texts, behind, strict=True)
        ]
