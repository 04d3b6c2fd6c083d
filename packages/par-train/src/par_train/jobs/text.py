"""The text of a job for the byte GPT. Imports no torch, so that the command checks a folder before any rank starts."""

import sysconfig

from par_data import FolderText, read_folder_text

from .._errors import UserError, as_user_error
from .options import DataOptions, Options


def read_text(options: DataOptions) -> FolderText:
    """Read the folder of text of a job; default: the source files of the Python standard library.

    Raises:
        UserError: The folder does not exist, cannot be read, or holds no text.
    """
    with as_user_error("data.folder: "):
        return read_folder_text(
            options.folder or sysconfig.get_path("stdlib"),
            patterns=options.patterns,
            validation_fraction=options.validation_fraction,
            documents=None if options.packing == "auto" else options.documents,
        )


def check_size(text: FolderText, options: Options) -> None:
    """Raise UserError if the text has too few windows to train or to validate on; rows of documents are not counted."""
    context, batch = options.model.context, options.train.batch_size
    windows, held_out = len(text.train) // context, len(text.held_out) // context
    if options.data.packing == "auto" and (windows < batch or not held_out):
        raise UserError(
            f"{str(text.folder)!r} gives {windows} windows of model.context {context} bytes to train on, and "
            f"{held_out} held out; a step needs train.batch_size {batch} of them, and validation 1: pass a folder with "
            "more text, or lower model.context or train.batch_size"
        )
