"""The rows of tokens that a job trains and validates on, whatever model it trains."""

from dataclasses import dataclass, field

from par_data import MixtureDataset, PackedDataset

Rows = PackedDataset | MixtureDataset


@dataclass(frozen=True, kw_only=True)
class JobData:
    """Rows of tokens, the same on every rank.

    Args:
        train: Rows to train on.
        held_out: Rows to validate on.
        context: Tokens in a row.
        vocabulary: Number of tokens that the tokenizer has.
        digest: Hash of all tokens and documents, which differs for other data.
        names: Paths of the data as the user wrote them, for messages.
        summary: Lines that describe the data in the banner.
        formats: Formats of the documents: "text", "jsonl" or "chat".
    """

    train: Rows
    held_out: Rows
    context: int
    vocabulary: int
    digest: str
    names: tuple[str, ...]
    summary: tuple[str, ...]
    formats: frozenset[str] = field(default_factory=lambda: frozenset({"text"}))
