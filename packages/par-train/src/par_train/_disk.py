"""Files that must be there."""

from pathlib import Path

from ._errors import UserError


def config_file(folder: Path, named: str) -> Path:
    """The config.json of a model's folder.

    Args:
        folder: The folder.
        named: What an error calls it, such as "model.path '/models/llama'".

    Raises:
        UserError: There is none.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"{named} holds no config.json; give the folder of a model, such as save_pretrained or "
            "huggingface_hub.snapshot_download leaves it"
        )
    return file
