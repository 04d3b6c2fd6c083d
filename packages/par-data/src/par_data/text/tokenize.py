"""Records of files to documents of tokens, with a Hugging Face tokenizer."""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from .records import Record, kind_of, lines_of, rows_of

_BATCH = 1000
"""Lines or rows that are tokenized at a time."""

_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "tokenization_*.py",
)


class Document(NamedTuple):
    """The tokens of a document.

    Args:
        tokens: The token ids.
        trained: For each token 1 if it is a target, else 0. None: all tokens are targets.
    """

    tokens: Sequence[int]
    trained: Sequence[int] | None


def find_tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer, sorted by name.

    Raises:
        ValueError: The folder has none.
    """
    found = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}
    if not found:
        raise ValueError(
            f"tokenizer={str(folder)!r} holds no tokenizer; use the folder of a Hugging Face model or tokenizer"
        )
    return sorted(found)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder, without network access.

    Raises:
        ValueError: transformers is not installed, or cannot load the folder.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ValueError(
            f"the tokenizer in {str(folder)!r} needs transformers; pip install transformers jinja2"
        ) from None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"transformers cannot load the tokenizer in {str(folder)!r} ({error}); repair the folder"
        ) from error


def documents_of(
    paths: Sequence[Path], tokenizer: Any, format_: str, field: str, template: str | None, progress: bool | None
) -> Iterator[Document]:
    """Tokenize the documents of files, line by line or row by row.

    Args:
        paths: The files.
        tokenizer: A Hugging Face tokenizer.
        format_: "text", "jsonl" or "chat".
        field: The key of the text in an object or a row.
        template: The chat template. None: the tokenizer's own.
        progress: Whether to show a progress bar. None: only if stderr is a terminal.

    Raises:
        ValueError: A line or row with another content, or a chat template that does not mark the assistant's tokens.
    """
    if format_ == "chat":
        template = check_template(tokenizer, template)
    hidden = not sys.stderr.isatty() if progress is None else not progress
    size = sum(path.stat().st_size for path in paths)
    with tqdm(total=size, desc="tokenize", unit="B", unit_scale=True, disable=hidden) as bar:
        left = chain.from_iterable(_records(path, format_, field, bar.update) for path in paths)
        # In batches, which fast tokenizers spread over threads.
        while records := list(islice(left, _BATCH)):
            if format_ == "chat":
                yield from _chats(tokenizer, template, records)
            else:
                yield from _texts(tokenizer, [record.value for record in records])


def _records(path: Path, format_: str, field: str, advance: Callable[[int], object]) -> Iterator[Record]:
    """Iterate over the texts or conversations of a file."""
    if format_ == "text":
        return lines_of(path, lambda line: line, advance)
    column, of_object = (field, partial(text_of, field=field)) if format_ == "jsonl" else ("messages", messages_of)
    if kind_of(path) == "rows":
        return rows_of(path, column, of_object, advance)
    return lines_of(path, lambda line: of_object(object_of(line)), advance)


def check_template(tokenizer: Any, template: str | None) -> str:
    """Return the chat template: the given one, else the tokenizer's.

    Raises:
        ValueError: There is none, or it does not mark which tokens are the assistant's.
    """
    template = template or tokenizer.chat_template
    if not isinstance(template, str):
        raise ValueError(
            f"the tokenizer has {'several chat templates' if template else 'no chat template'}; set template to a file"
        )
    # transformers would give a mask of zeros, and a model would train on nothing.
    if _TAG.search(template) is None:
        raise ValueError(
            "the chat template does not mark the assistant's part, so there are no targets; in a template of your own, "
            "write {% generation %} before the assistant's content and {% endgeneration %} after it"
        )
    return template


def text_of(value: Mapping[str, Any], field: str) -> str:
    """Return the text in an object.

    Raises:
        ValueError: The object has no such text. The message continues a sentence about the record.
    """
    if field not in value:
        raise ValueError(
            f"has no {field!r}, only {', '.join(map(repr, value)) or 'nothing'}; set field to the key of the text"
        )
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f"has {text!r:.60} under {field!r}; use a string")
    return text


def messages_of(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation in an object.

    Raises:
        ValueError: The object has no such conversation. The message continues a sentence about the record.
    """
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"has {messages!r:.60} under 'messages'; use a list with at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"has {message!r:.60} as message {number}; use an object with 'role' and 'content'")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"has {message.get('content')!r:.60} as the content of message {number}; use a string")
    return messages


def object_of(line: str) -> dict[str, Any]:
    """Parse the JSON object in a line.

    Raises:
        ValueError: The line holds no JSON object. The message continues a sentence about the record.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error}); write one object per line") from None
    if not isinstance(value, dict):
        raise ValueError(f"is {value!r:.60}, not a JSON object; write one object per line")
    return value


def _texts(tokenizer: Any, texts: list[str]) -> Iterator[Document]:
    """Tokenize texts, and append the end-of-text token to each if the tokenizer has one and did not append it."""
    # Some tokenizers append the end token themselves. Without one, a model would not learn where documents end.
    end = tokenizer.eos_token_id
    for tokens in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
        ends = end is None or (len(tokens) > 0 and tokens[-1] == end)
        yield Document(tokens if ends else [*tokens, end], None)


def _chats(tokenizer: Any, template: str | None, records: Sequence[Record]) -> Iterator[Document]:
    """Tokenize conversations; an error of the chat template names the location of the conversation."""

    def encode(some: Sequence[Record]) -> Any:
        return tokenizer.apply_chat_template(
            [record.value for record in some],
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            # transformers would warn of documents that exceed the model's context; packing splits them.
            tokenizer_kwargs={"verbose": False},
        )

    try:
        encoded = [encode(records)]
    except Exception:
        # A template may raise anything, and the error does not name the conversation: render one at a time.
        encoded = []
        for record in records:
            try:
                encoded.append(encode([record]))
            except Exception as error:
                raise ValueError(
                    f"{record.location} is rejected by the chat template ({error}); correct the conversation"
                ) from error
    for batch in encoded:
        for tokens, trained in zip(batch["input_ids"], batch["assistant_masks"], strict=True):
            yield Document(tokens, trained)
