"""Lines and rows of files to the tokens of documents, by a tokenizer of transformers."""

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

_OF_TOKENIZER = (
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
    """A document's tokens, and for each whether it is a target; None: all are."""

    tokens: Sequence[int]
    trained: Sequence[int] | None


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer, by name.

    Raises:
        ValueError: There are none.
    """
    found = {path for pattern in _OF_TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    if not found:
        raise ValueError(f"{str(folder)!r} holds no tokenizer; give the folder of a Hugging Face model or tokenizer")
    return sorted(found)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder. No network is asked.

    Raises:
        ValueError: transformers is not installed, or it cannot open the folder.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ValueError(
            f"opening the tokenizer in {str(folder)!r} needs transformers; pip install transformers jinja2"
        ) from None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"transformers cannot open the tokenizer in {str(folder)!r}: {error}; mend the folder"
        ) from error


def documents_of(
    paths: Sequence[Path], tokenizer: Any, format_: str, field: str, template: str | None, progress: bool | None
) -> Iterator[Document]:
    """The documents of files, line by line or row by row.

    Args:
        paths: The files.
        tokenizer: A tokenizer of transformers.
        format_: "text", "jsonl" or "chat".
        field: The key of the text in an object or a row.
        template: The chat template; None: the tokenizer's own.
        progress: Whether to show a bar; None: where stderr is a terminal.

    Raises:
        ValueError: A line or row that holds something else, or a chat template that does not say what the model says.
    """
    if format_ == "chat":
        template = check_template(tokenizer, template)
    hidden = not sys.stderr.isatty() if progress is None else not progress
    size = sum(path.stat().st_size for path in paths)
    with tqdm(total=size, desc="tokenize", unit="B", unit_scale=True, disable=hidden) as bar:
        left = chain.from_iterable(_records(path, format_, field, bar.update) for path in paths)
        while records := list(islice(left, _BATCH)):
            if format_ == "chat":
                yield from _chats(tokenizer, template, records)
            else:
                yield from _texts(tokenizer, [record.value for record in records])


def _records(path: Path, format_: str, field: str, advance: Callable[[int], object]) -> Iterator[Record]:
    """What a file's lines or rows hold: texts or conversations."""
    if format_ == "text":
        return lines_of(path, lambda line: line, advance)
    column, of_object = (field, partial(text_of, field=field)) if format_ == "jsonl" else ("messages", messages_of)
    if kind_of(path) == "rows":
        return rows_of(path, column, of_object, advance)
    return lines_of(path, lambda line: of_object(object_of(line)), advance)


def check_template(tokenizer: Any, template: str | None) -> str:
    """The template for conversations: one whose tag says which tokens are the assistant's.

    Raises:
        ValueError: There is none, or it has no such tag.
    """
    template = template or tokenizer.chat_template
    if not isinstance(template, str):
        raise ValueError(
            f"the tokenizer has {'several chat templates' if template else 'no chat template'}; give one file"
        )
    if _TAG.search(template) is None:
        raise ValueError(
            "the chat template does not say which part is the assistant's, so there is nothing to train on; in a "
            "template of your own write {% generation %} before what the assistant says and {% endgeneration %} behind"
        )
    return template


def text_of(value: Mapping[str, Any], field: str) -> str:
    """The text in an object.

    Raises:
        ValueError: What is wrong with it.
    """
    if field not in value:
        raise ValueError(
            f"has no {field!r}, only {', '.join(map(repr, value)) or 'nothing'}; name the field of the text"
        )
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f"has {text!r:.60} under {field!r}; give a text")
    return text


def messages_of(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation in an object.

    Raises:
        ValueError: What is wrong with it.
    """
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"has {messages!r:.60} under 'messages'; give a list with at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"has {message!r:.60} as message {number}; give an object with 'role' and 'content'")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"has {message.get('content')!r:.60} as the content of message {number}; give a text")
    return messages


def object_of(line: str) -> dict[str, Any]:
    """The object of JSON in a line.

    Raises:
        ValueError: What is wrong with the line.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is no JSON ({error}); write one object a line") from None
    if not isinstance(value, dict):
        raise ValueError(f"is {value!r:.60}, not a JSON object; write one object a line")
    return value


def _texts(tokenizer: Any, texts: list[str]) -> Iterator[Document]:
    """Texts as documents, each with the token that ends one, if there is such a token."""
    end = tokenizer.eos_token_id
    for tokens in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
        ends = end is None or (len(tokens) > 0 and tokens[-1] == end)
        yield Document(tokens if ends else [*tokens, end], None)


def _chats(tokenizer: Any, template: str | None, records: Sequence[Record]) -> Iterator[Document]:
    """Conversations as documents; where the template refuses one, its place is named."""

    def encode(some: Sequence[Record]) -> Any:
        return tokenizer.apply_chat_template(
            [record.value for record in some],
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )

    try:
        encoded = [encode(records)]
    except Exception:  # a template may refuse in any way; it is asked again, one by one
        encoded = []
        for record in records:
            try:
                encoded.append(encode([record]))
            except Exception as error:
                raise ValueError(
                    f"{record.place} is refused by the chat template ({error}); mend the conversation"
                ) from error
    for batch in encoded:
        for tokens, trained in zip(batch["input_ids"], batch["assistant_masks"], strict=True):
            yield Document(tokens, trained)
