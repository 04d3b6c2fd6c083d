"""All error messages of the packages, read one below the other.

`messages.txt` has every text that is given to an error, a line each: the module, the error's class, and the text with
its inserted values as {expression}. Whoever changes a message changes the list, and so reads it beside its neighbours.
This writes the list anew:

    python tests-integration/test_messages.py

Texts of errors that users meet are held to rules: a text names what is wrong, says beside it what is allowed or what to
do, and is a whole phrase.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"
LIST = Path(__file__).with_name("messages.txt")

BUILDERS = {"corrupt": ("CorruptError", 1)}
"""Functions that make an error: its class, and which argument is the text."""

USER_ERRORS = ("ValueError", "TypeError", "RuntimeError", "UserError", "TrainingError", "PipelineError")
"""What a user can mend. `CheckpointError` and its kind tell of files, and name these first."""

EXCEPTIONS = {
    "nothing was given that could be named": (
        "a schedule needs the actions of at least one rank",
        "a timeline needs events; give those of at least one rank",
        "no command is given; start with: par-train run, or see par-train --help",
        "root is an empty path; give a folder, such as 'runs/gpt', or '.' for this one",
        "the schedule has no actions; give each rank a list of Action, forward and backward",
        "there is no linear layer to convert to float8: none is chosen, or none has fitting sizes",
    ),
    "what is wrong has no name": (
        "some ranks of the group gave their losses a weight, and others gave theirs none, so the step was skipped; "
        "give every loss its number of items, 0 where there are none, or give none of them one",
        "the shared table is of another layer set; make both layers with the same one",
    ),
    "a longer text says where": (
        "torch.{name} is no dtype",
        "{constant} is no JSON",
        "{tag} has further keys beside it",
        "{tag} is no type that this version knows",
        "{twice!r} is there twice",
    ),
}
"""Texts that break a rule, by the reason."""

INSERTED = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\}")
"""An inserted value; the expression may hold brackets itself."""

BRINGS_A_TEXT = re.compile(r"\b(text|problem|message|error|remedy|suggest|differs|unknown_key)\b")
"""Expressions whose value is a text that is written, and read here, elsewhere."""

NAMES = re.compile(r"\w\(|\w=|`|\w\.\w|\b[A-Z]\w*[A-Z]\w*|a bug of par-")
"""What names a thing without an inserted value: a call, an option, a dotted name, a class; or that it is our bug."""


@cache  # three tests read it, and it reads every source
def messages() -> list[tuple[str, str, str]]:
    """The module, class and text of every error, sorted."""
    made = set()
    for path in PACKAGES.glob("*/src/**/*.py"):
        module = ".".join(path.with_suffix("").relative_to(PACKAGES).parts[2:]).removesuffix(".__init__")
        made |= {(module, error, text) for error, text in texts(ast.parse(path.read_text()))}
    return sorted(made)


def texts(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The errors that are made in a file, by class and text; not those whose whole text is made elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            error, position = BUILDERS.get(node.func.id, (node.func.id, 0))
            if error.endswith("Error") and len(node.args) > position:
                text = rendered(node.args[position])
                if INSERTED.sub("", text).strip(" :;,"):
                    yield error, text


def rendered(node: ast.expr) -> str:
    """The text that an expression makes, with {expression} for what is inserted."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        conversion = "" if node.conversion == -1 else f"!{chr(node.conversion)}"
        return "{" + ast.unparse(node.value) + conversion + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return rendered(node.left) + rendered(node.right)
    return "{" + ast.unparse(node) + "}"


def problems(text: str) -> Iterator[str]:
    """What is wrong with a text of an error that users meet."""
    inserted, plain = INSERTED.findall(text), INSERTED.sub("X", text)
    brings_a_text = any(BRINGS_A_TEXT.search(expression) for expression in inserted)
    if not inserted and not NAMES.search(text):
        yield "names neither a value, nor a call, an option or a class"
    if len(plain.split()) < 6 and not brings_a_text:
        yield "is shorter than six words"
    if not re.search(r"[:;,(]|\b(give|needs?|must|can|use|pass|may|not)\b", plain) and not brings_a_text:
        yield "says neither what is allowed nor what to do"
    if re.match(r"(An?|The|It|This|No|There|Cannot|Give|Use|Please|Invalid|Unknown|Expected|Got|Must)\b", plain):
        yield "begins with a capital letter, which no other does"
    if (
        plain != plain.strip()
        or plain.endswith((".", ":", ";", ","))
        or "  " in plain
        or re.search(r"[;,][a-z]", plain)
    ):
        yield "is no whole phrase: look at its ends, and at spaces where its lines are joined"
    if any(plain.count(one) != plain.count(other) for one, other in ("()", "[]", "{}")):
        yield "has brackets that do not match"


def test_the_list_of_messages_is_that_of_the_source():
    listed, made = set(LIST.read_text().splitlines()), {line(*message) for message in messages()}
    hint = "run `python tests-integration/test_messages.py`, and read the lines of messages.txt that it changes"
    assert listed == made, "\n".join([hint, *sorted(f"+ {each}" for each in made - listed), *sorted(listed - made)])


def test_texts_for_users_name_what_is_wrong_and_what_to_do():
    excepted = {text for some in EXCEPTIONS.values() for text in some}
    wrong = [
        f"{line(module, error, text)}\n    {problem}"
        for module, error, text in messages()
        if error in USER_ERRORS and text not in excepted
        for problem in problems(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_exceptions_are_needed():
    made = {text for _, error, text in messages() if error in USER_ERRORS}
    for text in (text for some in EXCEPTIONS.values() for text in some):
        assert text in made, f"no error has this text any more: {text}"
        assert list(problems(text)), f"this text breaks no rule: {text}"


def line(module: str, error: str, text: str) -> str:
    return f"{module} {error}: {text}".replace("\n", "\\n")


if __name__ == "__main__":
    LIST.write_text("".join(f"{line(*message)}\n" for message in messages()))
