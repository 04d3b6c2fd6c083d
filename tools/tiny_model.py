"""A tiny model that transformers opens, its tokenizer, and texts to train it on: made in seconds, without a network.

    python tools/tiny_model.py /tmp/tiny            # config.json, tokenizer.json, tokenizer_config.json, ...
    python tools/tiny_model.py /tmp/tiny --weights 0 --corpora /tmp/texts

The model is a Llama of two layers. The tokenizer is a byte-level BPE with a chat template, trained on files of the
Python standard library, which every machine has; so are the texts. The same Python gives the same files. Needs
transformers, and torch where weights are asked for.
"""

import argparse
import ast
import hashlib
import importlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""What a conversation looks like; the tag marks what the model says, and is trained on."""

PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
"""The tokens that no text is made of, by their numbers from 0 on."""


def make_model(
    folder: Path | str,
    *,
    vocabulary: int = 512,
    files: int = 60,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 256,
    weights: int | None = None,
) -> None:
    """Writes a Llama's config and its tokenizer into a folder, and its weights if they are asked for.

    Args:
        folder: Where to; it is made.
        vocabulary: Number of tokens: 256 bytes, the special ones, and merged ones.
        files: Number of files of the standard library that the tokenizer is trained on.
        layers: Number of decoder layers.
        width: Width of the residual stream.
        heads: Number of attention heads.
        kv_heads: Number of heads of keys and values.
        context: Number of positions.
        weights: Seed of the random weights; None writes none.

    Raises:
        ValueError: A vocabulary without room for every byte and the special tokens.
    """
    if vocabulary < 256 + len(SPECIAL):
        raise ValueError(
            f"vocabulary is {vocabulary}; give at least {256 + len(SPECIAL)}, for bytes and special tokens"
        )
    transformers: Any = importlib.import_module("transformers")  # slow, and `--help` does without
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((path.read_text() for path in sources(files)), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END, model_max_length=context
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=None,
        eos_token_id=SPECIAL.index(END),
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    if weights is not None:
        import torch  # noqa: PLC0415 - slow

        torch.manual_seed(weights)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)


def write_corpora(folder: Path | str, *, files: int = 60) -> dict[str, Path]:
    """Writes one corpus of each format: what functions of the standard library say of themselves.

    Args:
        folder: Where to; it is made.
        files: Number of files of the standard library to take them from.

    Returns:
        The paths by format: "text" has a document a line, "jsonl" a document under "text", "chat" a conversation
        under "messages".
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    described = list(descriptions(files))
    lines = {
        "text": [" ".join(text.split()) for _, _, text in described],
        "jsonl": [json.dumps({"text": source, "name": name}) for name, source, _ in described],
        "chat": [
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"What does {name} do?"},
                        {"role": "assistant", "content": " ".join(text.split())},
                    ]
                }
            )
            for name, _, text in described
        ],
    }
    paths = {"text": folder / "lines.txt", "jsonl": folder / "documents.jsonl", "chat": folder / "chat.jsonl"}
    for kind, path in paths.items():
        path.write_text("\n".join(lines[kind]) + "\n", encoding="utf-8")
    return paths


def sources(count: int) -> list[Path]:
    """Modules of the standard library, all over it, but the same on every machine with this Python."""
    library = Path(sysconfig.get_path("stdlib"))
    named = (path for path in library.glob("*.py") if path.stat().st_size > 1000)
    return sorted(named, key=lambda path: hashlib.sha256(path.name.encode()).digest())[:count]


def descriptions(files: int) -> Iterator[tuple[str, str, str]]:
    """Name, source and docstring of functions and classes that have one."""
    for path in sources(files):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                yield f"{path.stem}.{node.name}", "\n".join(lines[node.lineno - 1 : node.end_lineno]), text


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model's files go")
    parser.add_argument("--vocabulary", type=int, default=512, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="decoder layers (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, metavar="N", help="of the stream (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, metavar="N", help="positions (default: %(default)s)")
    parser.add_argument("--weights", type=int, metavar="SEED", help="write random weights, too")
    parser.add_argument("--corpora", type=Path, metavar="FOLDER", help="write texts to train on there")
    parser.add_argument("--files", type=int, default=60, metavar="N", help="of the library (default: %(default)s)")
    given = parser.parse_args()
    try:
        make_model(
            given.folder,
            vocabulary=given.vocabulary,
            files=given.files,
            layers=given.layers,
            width=given.width,
            context=given.context,
            weights=given.weights,
        )
    except ValueError as error:
        parser.error(str(error))
    paths = [given.folder]
    if given.corpora is not None:
        paths += write_corpora(given.corpora, files=given.files).values()
    sys.stdout.writelines(f"wrote {path}\n" for path in paths)


if __name__ == "__main__":
    main()
