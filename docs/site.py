"""What MkDocs calls when it builds the site: it fills the error index, and ranks the pages of the search."""

from itertools import groupby
from pathlib import Path
from typing import Any

LISTS = ("reference/", "benchmarks/", "decisions/", "errors.md", "glossary.md", "rooms.md")
"""Pages that name every term. A search for a term should find the guide to it first."""

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
