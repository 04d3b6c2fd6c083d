"""What an existing model is trained on: a file's tokens, in rows; and what must stay as it was when a run goes on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from par_precision import precision_of

from ..._errors import UserError
from ...data.corpus import Corpus, read_corpus
from ...data.rows import PackedRows
from ...run.stop import Stop
from ..checkpoint import START_ANEW, TrainingState
from ..options import Options
from .folder import ModelFolder


@dataclass(frozen=True, kw_only=True)
class ModelData:
    """A model of transformers and the tokens that it is trained on.

    Args:
        folder: The model.
        corpus: The tokens of all documents.
        train: Rows of documents to train on.
        held_out: Rows of documents to validate on.
        documents: The number of documents to train on, and of those that are held out.
    """

    folder: ModelFolder
    corpus: Corpus
    train: PackedRows
    held_out: PackedRows
    documents: tuple[int, int]

    @property
    def digest(self) -> str:
        """Another one for other tokens."""
        return self.corpus.path.name


def read_data(options: Options, folder: ModelFolder, stop: Stop) -> ModelData:
    """Makes the tokens of a file, or finds those that were made before, and rows of them. Collective.

    Args:
        options: The options of the run.
        folder: The model, whose tokenizer reads the file.
        stop: What this rank was asked for: tokenizing ends at once.

    Raises:
        UserError: A line that is wrong, a tokenizer that is not the model's, or too little text; on every rank.
        InterruptedError: This rank was asked to leave while it tokenized; the others raise a UserError.
    """
    data = options.data
    try:
        corpus = read_corpus(
            Path(data.path).expanduser(),
            folder.path,
            options.files.folder / "data",
            format=data.format,
            field=data.field,
            template=Path(data.template).expanduser() if data.template else None,
            stop=lambda: stop.signal != 0,
        )
    except ValueError as error:  # its own kind on the rank that read the file, another one on those that waited
        raise UserError(str(error)) from error
    words = folder.vocabulary
    if words is not None and corpus.vocabulary > words:
        raise UserError(
            f"the tokenizer in {str(folder.path)!r} knows {corpus.vocabulary} tokens, and the model's embedding has "
            f"{words}; give the tokenizer that the model was made with, or resize the model's embedding"
        )
    train, held_out = corpus.split(data.validation_fraction)
    if not len(train) or not len(held_out):
        raise UserError(
            f"data.path {data.path!r} has {len(corpus)} documents, of which data.validation_fraction "
            f"{data.validation_fraction:g} holds out {len(held_out)}; give more documents, or another part, so that "
            "there are some to train on and some to validate on"
        )
    try:
        rows = PackedRows(corpus, context=folder.context, documents=train, packing=data.rows, seed=options.seed)
        others = PackedRows(corpus, context=folder.context, documents=held_out)
    except ValueError as error:
        raise UserError(f"data.path {data.path!r}: {error}") from None
    if rows.count(0) < options.train.batch_size:
        raise UserError(
            f"data.path {data.path!r} fills {rows.count(0)} rows of {folder.context} tokens, less than a batch of "
            f"train.batch_size {options.train.batch_size}; lower it, shorten data.context, or give more text"
        )
    return ModelData(folder=folder, corpus=corpus, train=rows, held_out=others, documents=(len(train), len(held_out)))


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
        **{f"adapter.{name}": list(value) if isinstance(value, tuple) else value for name, value in adapter.items()},
        "precision": options.precision,
    }


def check_goes_on(options: Options, data: ModelData, state: TrainingState) -> None:
    """Makes sure that going on from the checkpoint is going on with the same run.

    How long and how fast to train may change; the model, the dtype of its weights, its rows and the seed may not.

    Raises:
        UserError: Something differs; the message names it.
    """
    path = str(options.files.checkpoint)
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
            f"data.path {options.data.path!r} gives other tokens than the checkpoint {path!r} was trained on; bring "
            f"the file, its format and the tokenizer back, or {START_ANEW}"
        )
