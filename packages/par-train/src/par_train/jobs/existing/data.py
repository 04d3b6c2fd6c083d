"""What an existing model is trained on: a file's tokens, in rows; and what must stay as it was when a run goes on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from par_data import Corpus, MixedRows, PackedRows, read_corpus
from par_precision import precision_of

from ..._errors import UserError, as_user_error
from ...run.stop import Stop
from ..checkpoint import START_ANEW, Origin
from ..options import Options
from .folder import ModelFolder
from .sources import Source, sources_of

Rows = PackedRows | MixedRows


@dataclass(frozen=True, kw_only=True)
class ModelData:
    """A model of transformers and the tokens that it is trained on.

    Args:
        folder: The model.
        corpora: The tokens of all documents, by the path that they are of.
        train: Rows of documents to train on.
        held_out: Rows of documents to validate on.
        documents: The number of documents to train on, and of those that are held out.
    """

    folder: ModelFolder
    corpora: Mapping[str, Corpus]
    train: Rows
    held_out: Rows
    documents: tuple[int, int]

    @property
    def digest(self) -> str:
        """Another one for other tokens."""
        return "+".join(corpus.path.name for corpus in self.corpora.values())

    @property
    def formats(self) -> set[str]:
        """What documents are: "text", "jsonl" or "chat"."""
        return {corpus.format for corpus in self.corpora.values()}

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(len(corpus.tokens) for corpus in self.corpora.values())

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the tokenizer knows."""
        return next(iter(self.corpora.values())).vocabulary


def read_data(options: Options, folder: ModelFolder, stop: Stop) -> ModelData:
    """Makes the tokens of files, or finds those that were made before, and rows of them. Collective.

    Args:
        options: The options of the run.
        folder: The model, whose tokenizer reads the files.
        stop: What this rank was asked for: tokenizing ends at once.

    Raises:
        UserError: A line or row that is wrong, a tokenizer that is not the model's, or too little text; on every rank.
        InterruptedError: This rank was asked to leave while it tokenized; the others raise a UserError.
    """
    data, corpora = options.data, dict[str, Corpus]()
    train, held_out = dict[str, PackedRows](), dict[str, PackedRows]()
    documents = np.zeros(2, np.int64)
    sources = sources_of(data, "model.path")
    for source in sources:
        corpora[source.path] = corpus = _read(source, options, folder, stop)
        parts = corpus.split(data.validation_fraction)
        if not len(parts[0]) or not len(parts[1]):
            raise UserError(
                f"{source.key} {source.path!r} has {len(corpus)} documents, of which data.validation_fraction "
                f"{data.validation_fraction:g} holds out {len(parts[1])}; give more documents, or another part, so "
                "that there are some to train on and some to validate on"
            )
        documents += [len(part) for part in parts]
        with as_user_error(f"{source.key} {source.path!r}: "):
            train[source.path] = PackedRows(
                corpus, context=folder.context, documents=parts[0], packing=data.rows, seed=options.seed
            )
            held_out[source.path] = PackedRows(corpus, context=folder.context, documents=parts[1])
    weights = {source.path: source.weight for source in sources if source.weight is not None}
    rows: Rows = MixedRows(train, weights) if weights else train[sources[0].path]
    others: Rows = MixedRows(held_out) if weights else held_out[sources[0].path]
    if rows.count(0) < options.train.batch_size:
        raise UserError(
            f"{sources[0].key} {sources[0].path!r}{' and the others fill' if weights else ' fills'} {rows.count(0)} "
            f"rows of {folder.context} tokens, less than a batch of train.batch_size {options.train.batch_size}; lower "
            "it, shorten data.context, or give more text"
        )
    numbers = int(documents[0]), int(documents[1])
    return ModelData(folder=folder, corpora=corpora, train=rows, held_out=others, documents=numbers)


def _read(source: Source, options: Options, folder: ModelFolder, stop: Stop) -> Corpus:
    """The tokens of one source, which the model's embedding must know."""
    template = options.data.template
    with as_user_error():
        corpus = read_corpus(
            source.place,
            folder.path,
            options.files.folder / "data",
            format=source.format,  # type: ignore[arg-type]  # checked with the options
            field=source.field,
            template=Path(template).expanduser() if template else None,
            stop=lambda: stop.signal != 0,
        )
    words = folder.vocabulary
    if words is not None and corpus.vocabulary > words:
        raise UserError(
            f"the tokenizer in {str(folder.path)!r} knows {corpus.vocabulary} tokens, and the model's embedding has "
            f"{words}; give the tokenizer that the model was made with, or resize the model's embedding"
        )
    return corpus


def kept_options(options: Options, context: int) -> Mapping[str, Any]:
    """Options that may not change when a run goes on, by their names.

    Args:
        options: The options of the run.
        context: Tokens in a row.
    """
    adapter = asdict(options.adapter)
    return {
        "seed": options.seed,
        "data.context": context,
        "data.packing": options.data.rows,
        "data.validation_fraction": options.data.validation_fraction,
        **({"data.sources": [dict(source) for source in options.data.sources]} if options.data.sources else {}),
        **{f"adapter.{name}": list(value) if isinstance(value, tuple) else value for name, value in adapter.items()},
        "precision": options.precision,
    }


def check_goes_on(options: Options, data: ModelData, origin: Origin) -> None:
    """Makes sure that going on from the checkpoint is going on with the same run.

    How long and how fast to train may change; the model, the dtype of its weights, its rows and the seed may not.

    Raises:
        UserError: Something differs; the message names it.
    """
    path, state = origin.folder, origin.state
    if not state.model:
        raise UserError(
            f"the checkpoint {path!r} is of a byte-level GPT, and model.path names a model of transformers; name "
            f"another folder with --output, or {START_ANEW}"
        )
    if state.model != data.folder.digest:
        raise UserError(
            f"the checkpoint {path!r} was trained from another model than {str(data.folder.path)!r} is now; bring the "
            f"folder back as it was, or {START_ANEW}"
        )
    for name, now in kept_options(options, data.folder.context).items():
        was = state.kept.get(name)
        if name == "precision" and precision_of(str(was)).weights == precision_of(now).weights:
            continue
        if was != now:
            raise UserError(
                f"the checkpoint {path!r} has {name} {was!r}, but the config says {now!r}; set it back, or {START_ANEW}"
            )
    if state.text != data.digest:
        raise UserError(
            f"{' and '.join(map(repr, data.corpora))} {'give' if len(data.corpora) > 1 else 'gives'} other tokens than "
            f"the checkpoint {path!r} was trained on; bring the files, their format and the tokenizer back, or "
            f"{START_ANEW}"
        )
