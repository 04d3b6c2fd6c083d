"""The rows of bytes that the byte GPT trains on, out of a text in memory.

Every byte is a token. A window is a document of `context` bytes, so that windows are rows as documents are.
"""

import numpy as np

from par_data import Corpus, FolderText, PackedDataset

from .._errors import UserError, as_user_error
from ..run.output import end_of
from .options import Options
from .recipe import JobData

PADDING = 0
"""The byte that fills rows; no text file contains it."""


def text_rows(options: Options, text: FolderText) -> JobData:
    """Make the rows of a text.

    Raises:
        UserError: The text fills too few rows.
    """
    data, context, batch = options.data, options.model.context, options.train.batch_size
    has_documents = data.packing != "auto"
    train, held_out = (
        Corpus.from_bytes(part, np.full(len(part) // context, context) if lengths is None else lengths, PADDING)
        for part, lengths in zip((text.train, text.held_out), text.documents or (None, None), strict=True)
    )
    with as_user_error(f"data.folder {str(text.folder)!r}: "):
        packing = data.packing if data.packing != "auto" else "stream"
        rows = PackedDataset(train, context=context, packing=packing, seed=options.seed)
        others = PackedDataset(held_out, context=context, packing="whole" if has_documents else "stream")
    if rows.count(0) < batch:
        raise UserError(
            f"data.folder {str(text.folder)!r} fills {rows.count(0)} rows of {context} bytes, less than a batch of "
            f"train.batch_size {batch}; pass a folder with more text, or lower model.context or train.batch_size"
        )
    packed = (f"packed {data.documents}, {data.packing}",) if has_documents else ()
    return JobData(
        train=rows,
        held_out=others,
        context=context,
        vocabulary=256,
        digest=text.digest,
        names=("data.folder",),
        summary=(
            end_of(str(text.folder)),
            f"{text.files:,} files, {len(text.train):,} bytes to train on, {len(text.held_out):,} held out",
            *packed,
        ),
    )
