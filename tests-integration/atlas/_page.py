"""The page docs/models.md: made of the results of the atlas, and read again to compare it with new ones."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from par_layers.models.plans import families  # noqa: F401 - registers its plans
from par_layers.models.plans.plans import PLANS

Result = Mapping[str, Any]

EQUAL, NONE, WRONG = "equal", "n/a", "**wrong**"

INTRODUCTION = """\
# Supported models

This page shows which types of Hugging Face Transformers models train under which kind of parallelism. Read it before
you choose a topology for a model.

    python tools/atlas.py

The command makes a tiny random model of every type that has a plan for tensor parallelism. Each model keeps every kind
of layer that its type has. The command trains the model for two steps on two ranks, in fp64, and compares the run with
plain PyTorch in one process:

- **equal**: both losses, and every weight after two steps of SGD with momentum, differ by less than 1e-10. The saved
  files have the names, shapes and values that `save_pretrained` writes.
- **a number**: `Strategy` raises an error before training, on all ranks. The [list below](#reasons) shows the message.
- **n/a**: the type has no experts.

A raw error, a hang, an error on some ranks only or any other number counts as wrong. The suite compares two
types with this page, and its long tests compare all of them.

## The columns

| column | options of `Strategy` |
|---|---|
| tensor | `parallel={"tensor": {"size": 2, "mode": "1d"}}` |
| sequence parallel | the same with `"sequence_parallel": True` |
| gather, ring, ulysses | `parallel={"sequence": {"size": 2, "mode": "gather"}}`, and the other modes |
| pipeline | `parallel={"pipeline": 2}, pipeline={"microbatches": 2}` |
| experts | `parallel={"expert": 2}` |
| ZeRO 3 | `zero=3` |
"""

EXCEPTIONS = """\
The rules of par read the structure of a model, so that they apply to types that nobody has tried. Types whose plan in
Transformers does not suffice have a plan of par by name: {names}. There may be {most} at most.
"""

MOST_EXCEPTIONS = 10

TYPES = """\
## The types

The second column shows the class. A class without a causal head trains by a cross entropy of its logits or features.
"""

REASONS = """\
## Reasons

Each line is the cause in the message of one type. The message then says what to do instead. The messages of other types
have other names in the same places.
"""

UNTRIED = """\
## Types that are not tried

These configurations have a plan, but no model was made of them. Most are the image encoders of larger models.
"""


def line(result: Result) -> str:
    """Return a result in a line."""
    if not result["made"]:
        return f"{result['type']}: not made, {result['reason']}"
    counts = Counter(cell["kind"] for cell in result["cells"].values())
    wrong = [f"{way}: {cell['reason']}" for way, cell in result["cells"].items() if cell["kind"] == "wrong"]
    return f"{result['type']} {result['seconds']:.0f} s {dict(counts)} {'; '.join(wrong)}"


def exceptions() -> list[str]:
    """Return the types that par has a plan for by name."""
    return sorted(PLANS.names())


def page(results: Sequence[Result]) -> str:
    """Return the whole page.

    Args:
        results: The results of all types, in order.
    """
    made = [result for result in results if result["made"]]
    ways = list(made[0]["cells"])
    reasons: dict[str, str] = {}  # an example for each kind of message, in the order of the page
    for result in made:
        for cell in result["cells"].values():
            if short(cell) == "refused":
                reasons.setdefault(kind_of(cell["reason"]), cell["reason"])
    numbers = {kind: str(number) for number, kind in enumerate(reasons, 1)}
    rows = [
        [
            f"`{result['type']}`",
            result["class"],
            *(
                numbers[kind_of(cell["reason"])] if short(cell) == "refused" else short(cell)
                for cell in result["cells"].values()
            ),
        ]
        for result in made
    ]
    counts = []
    for way in ways:
        of_way = Counter(short(result["cells"][way]) for result in made)
        counts.append([way, *(str(of_way[kind]) for kind in (EQUAL, "refused", NONE, WRONG))])
    environment = (
        f"{len(made)} types, transformers {version('transformers')}, torch {version('torch')}, on CPUs with gloo."
    )
    untried = [f"- `{result['type']}`: {plain(result['reason'])}" for result in results if not result["made"]]
    parts = [
        INTRODUCTION,
        "## Counts\n",
        environment + "\n",
        EXCEPTIONS.format(names=", ".join(f"`{name}`" for name in exceptions()), most=MOST_EXCEPTIONS),
        *table(["", "equal", "not supported", "no experts", "wrong"], counts),
        TYPES,
        *table(["type", "class", *ways], rows),
        REASONS,
        *(f"{numbers[kind]}. {plain(cause_of(text))}" for kind, text in reasons.items()),
        "",
        UNTRIED,
        *untried,
        "",
    ]
    return "\n".join(parts)


def short(cell: Mapping[str, Any]) -> str:
    """Return a cell as the page has it, but for the number of its reason: equal, refused, n/a, or wrong."""
    if cell["kind"] == "refused":
        return NONE if "has the rule 'ep_dispatch_experts'" in cell["reason"] else "refused"
    return EQUAL if cell["kind"] == "equal" else WRONG


def kind_of(reason: str) -> str:
    """Return the cause in a message without the names and numbers of its type, so that equal causes are equal."""
    text = re.sub(r"'[^']*'", "'…'", cause_of(reason))
    text = re.sub(r"\b[A-Z]\w*[a-z]\w*[A-Z]\w*", "…", text)
    text = re.sub(r"\b[\w.]+\.\d+[\w.]*", "…", text)
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "N", text)


def cause_of(reason: str) -> str:
    """Return the beginning of a message, before it says what to do."""
    return reason.partition("; ")[0]


def plain(text: str) -> str:
    """Return a message with the characters escaped that Markdown would take for its own."""
    return re.sub(r"([*_<>\[\]|])", r"\\\1", text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty line."""
    return [*(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)), ""]


def differences(text: str, results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each cell of new results that differs from the page.

    Args:
        text: The page.
        results: Results, of any types.
    """
    rows = [[entry.strip() for entry in each.strip("|").split("|")] for each in text.splitlines() if each[:1] == "|"]
    header = next(row for row in rows if row[0] == "type")
    known = {row[0].strip("`"): dict(zip(header, row, strict=True)) for row in rows if row[0][:1] == "`"}
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    for result in results:
        name = result["type"]
        if result["made"] != (name in known):
            yield f"{name}: {line(result)}, unlike the page"
            continue
        for way, cell in result["cells"].items() if result["made"] else ():
            written, found = known[name][way], short(cell)
            same = written == found
            if found == "refused":
                on_page = re.sub(r"\\(.)", r"\1", reasons.get(written, ""))  # without the backslashes of `plain`
                same = kind_of(cell["reason"]) == kind_of(on_page)
            if not same:
                yield f"{name}, {way}: {written} on the page, but {found}: {cell['reason']}"
