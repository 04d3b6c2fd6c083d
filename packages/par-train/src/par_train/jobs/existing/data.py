"""The tokens of files in rows, for a Hugging Face Transformers model."""

from pathlib import Path

import numpy as np

from par_data import Corpus, MixtureDataset, PackedDataset, read_corpus

from ..._errors import UserError, as_user_error
from ...run.output import end_of
from ...run.stop import Stop
from ..options import Options
from ..recipe import JobData, Rows
from .folder import ModelFolder
from .sources import CorpusSource, sources_of


def read_data(options: Options, folder: ModelFolder, stop: Stop) -> JobData:
    """Tokenize files, or find the tokens of an earlier run, and make rows of them. Collective.

    Args:
        options: Options of the run.
        folder: Folder of the model, whose tokenizer is used.
        stop: Requests to this rank; a request ends tokenization at once.

    Raises:
        UserError: A line is malformed, the tokenizer does not fit the model, or the text is too short; on every rank.
        InterruptedError: This rank was asked to leave while it tokenized; the other ranks raise UserError.
    """
    data, corpora = options.data, dict[str, Corpus]()
    train, held_out = dict[str, PackedDataset](), dict[str, PackedDataset]()
    documents = np.zeros(2, np.int64)
    sources = sources_of(data, "model.path")
    for source in sources:
        corpora[source.path] = corpus = _read(source, options, folder, stop)
        # The split is by a hash of each document, so it does not change when files are added.
        parts = corpus.split(data.validation_fraction)
        if not len(parts[0]) or not len(parts[1]):
            raise UserError(
                f"{source.key} {source.path!r} has {len(corpus)} documents, of which data.validation_fraction "
                f"{data.validation_fraction:g} holds out {len(parts[1])}; give more documents, or another part, so "
                "that there are some to train on and some to validate on"
            )
        documents += [len(part) for part in parts]
        with as_user_error(f"{source.key} {source.path!r}: "):
            train[source.path] = PackedDataset(
                corpus, context=folder.context, documents=parts[0], packing=data.rows, seed=options.seed
            )
            held_out[source.path] = PackedDataset(corpus, context=folder.context, documents=parts[1])
    weights = {source.path: source.weight for source in sources if source.weight is not None}
    rows: Rows = MixtureDataset(train, weights) if weights else train[sources[0].path]
    others: Rows = MixtureDataset(held_out) if weights else held_out[sources[0].path]
    if rows.count(0) < options.train.batch_size:
        raise UserError(
            f"{sources[0].key} {sources[0].path!r}{' and the others fill' if weights else ' fills'} {rows.count(0)} "
            f"rows of {folder.context} tokens, less than a batch of train.batch_size {options.train.batch_size}; lower "
            "it, shorten data.context, or give more text"
        )
    formats = frozenset(corpus.format for corpus in corpora.values())
    tokens = sum(len(corpus.tokens) for corpus in corpora.values())
    parts_of = [f" x {weights[path]:g}" if weights else "" for path in corpora]
    return JobData(
        train=rows,
        held_out=others,
        context=folder.context,
        vocabulary=folder.vocabulary or next(iter(corpora.values())).vocabulary,
        digest="+".join(corpus.path.name for corpus in corpora.values()),
        names=tuple(corpora),
        summary=(
            *(f"{end_of(path)}{part}" for path, part in zip(corpora, parts_of, strict=True)),
            f"{', '.join(sorted(formats))}: {tokens:,} tokens; {documents[0]:,} documents, {documents[1]:,} held out",
        ),
        formats=formats,
    )


def _read(source: CorpusSource, options: Options, folder: ModelFolder, stop: Stop) -> Corpus:
    """Tokenize one source, and check that the model's embedding has all tokens."""
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
