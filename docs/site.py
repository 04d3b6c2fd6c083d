"""Functions that MkDocs calls when it builds the site: they fill the error index, and rank and check the search."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

LISTS = ("reference/", "benchmarks/", "decisions/", "errors.md", "glossary.md", "rooms.md")
"""Pages that name every term. A search for a term should find the guide to it first."""

FIRST = {
    "activation checkpointing": "concepts/recompute/",
    "context parallelism": "concepts/context/",
    "gradient accumulation": "guides/gradient-accumulation/",
    "gradient clipping": "guides/gradient-clipping/",
    "LoRA": "guides/lora/",
    "offload": "concepts/offload/",
    "quickstart": "tutorials/",
    "rendezvous": "clusters/torchrun/",
    "resume": "guides/resume/",
    "sequence packing": "concepts/data/",
    "tensor parallel": "concepts/layers/",
    "troubleshooting": "troubleshooting/",
}
"""Terms that people search for, and the beginning of the page's address that a search must list first."""

MESSAGES = Path(__file__).parent.parent / "tests-integration" / "messages.txt"


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Return a page's text with the messages in place of their marker."""
    if page.file.src_uri.startswith(LISTS):
        page.meta["search"] = {"boost": 0.2}
    return markdown.replace("<!-- messages -->", index()) if page.file.src_uri == "errors.md" else markdown


def index() -> str:
    """Return the messages as Markdown: a section per package, a block of code per module."""
    lines = [line.split(" ", 1) for line in MESSAGES.read_text().splitlines()]
    text = []
    for package, of_package in groupby(lines, lambda line: line[0].partition(".")[0]):
        text.append(f"## {package.replace('_', '-')}\n")
        for module, of_module in groupby(of_package, lambda line: line[0]):
            messages = "\n".join(message.replace("\\n", " ") for _, message in of_module)
            text.append(f"`{module}`\n\n```text\n{messages}\n```\n")
    return "\n".join(text)


def on_post_build(*, config: Any, **_: object) -> None:
    """Warn about each term of `FIRST` whose page is not the first result; `mkdocs build --strict` then fails."""
    found = json.loads(Path(config["site_dir"], "search", "search_index.json").read_text())
    pages = first_pages(found["docs"], found["config"], list(FIRST))
    for term, address in FIRST.items():
        if not pages[term].startswith(address):
            logging.getLogger("mkdocs").warning(f"a search for {term!r} finds {pages[term]!r} before {address!r}")


def first_pages(
    sections: Sequence[Mapping[str, Any]], config: Mapping[str, Any], terms: Sequence[str]
) -> dict[str, str]:
    """Return the address of the page that a search in the theme lists first, by term.

    The theme searches with lunr in the browser. It then prefers pages to sections, and results with more of the words.

    Args:
        sections: Entries of the site's search index: pages, and sections with "#" in their location.
        config: Settings of the search index.
        terms: The terms.
    """
    lunr, stop = import_module("lunr.builder"), import_module("lunr.stop_word_filter")
    builder, separator = lunr.Builder(), re.compile(config["separator"])
    builder.ref("location")
    builder.b(0)  # as in the theme: a long section is not worse than a short one
    builder.pipeline.add(stop.stop_word_filter)
    builder.search_pipeline.add(stop.stop_word_filter)
    for field, options in config["fields"].items():
        builder.field(field, boost=options["boost"])
    for section in sections:
        words = {name: separator.split(re.sub("<[^>]+>", " ", str(section.get(name, "")))) for name in config["fields"]}
        words = {name: [word.lower() for word in split if word] for name, split in words.items()}
        builder.add({**words, "location": section["location"]}, {"boost": section.get("boost", 1)})
    index, pages = builder.build(), {}
    for term in terms:
        wanted = term.lower().split()
        found = index.search(" ".join(f"{word}*" for word in wanted))
        best = max(found, key=lambda result: _score(result, wanted))
        pages[term] = best["ref"].partition("#")[0]
    return pages


def _score(result: Mapping[str, Any], words: Sequence[str]) -> float:
    """Return the score of a result as the theme computes it from lunr's score."""
    matched = sum(any(found.startswith(word) for found in result["match_data"].metadata) for word in words) / len(words)
    return float(result["score"] * (1 + (("#" not in result["ref"]) + matched) ** 2))
