"""File names that a save may replace, keep or sweep. Pure: names in, names out."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from .._errors import CheckpointError, CorruptError
from ..format.manifest import GENERATION, MANIFEST, OBJECTS, SIDE_FILE, TEMPLATES, decode_manifest

_VARIANT, _SHARD = r"(\.[0-9A-Za-z_]+)?", r"(-[0-9]{5}-of-[0-9]{5})?"
_WEIGHTS = re.compile(
    rf"(adapter_)?model{_VARIANT}{_SHARD}{_VARIANT}\.safetensors|(adapter_)?model\.safetensors\.index{_VARIANT}\.json"
    rf"|pytorch_model{_VARIANT}{_SHARD}{_VARIANT}\.bin|pytorch_model\.bin\.index{_VARIANT}\.json|adapter_model\.bin"
)
_OF_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "*vocab.json",
    "merges*.txt",
    "dict*.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*preprocessor_config.json",
    "processor_config.json",
    "chat_template*",
    f"{TEMPLATES}*.jinja",
    "*.model",  # sentencepiece
    "*.spm",
    "*.bpe",
    "*.codes",
    "*.vocab",
    "*.tiktoken",
    "*.tokenizer",
    "byte_maps.json",
    "emoji.json",
    "normalizer.json",
    "tekken.json",
    "word_pronunciation.json",
    "word_shape.json",
    "tokenization_*.py",
    "*processing_*.py",
    "feature_extraction_*.py",
)
"""What tokenizers and processors of transformers write."""

_BESIDE_WEIGHTS = (
    *_OF_TOKENIZER,
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "README.md",
    ".gitattributes",
    "LICENSE*",
    "NOTICE*",
)
_NOT_OF_TOKENIZER = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "model_index.json",
    "*.index.json",
    "*.index.*.json",
    "quant*.json",
    "*_results.json",
    "*_state.json",
    "*_args.json",
    "par_checkpoint*",
)
"""JSON of other kinds in a model's folder. Tokenizers have files of any other name: their own code chooses it."""


def check_replaceable(url: str, names: Iterable[str], manifest: bytes | None) -> None:
    """Check that every file of an old checkpoint is ours or a standard Hugging Face file.

    Args:
        url: The folder, for the message.
        names: The names of all files in it, relative to it.
        manifest: The bytes of its manifest, if it has one; one that does not decode vouches for nothing.

    Raises:
        CheckpointError: It holds other files.
    """
    # What the manifest names is ours under any name; other files must at least look like those of a model.
    known = _named_in(manifest) | {MANIFEST, SHOWN, BEGUN}
    unknown = sorted(name for name in names if _in_generation(name) not in known)
    unknown = [name for name in unknown if not is_standard(_in_generation(name))]
    if unknown:
        shown = ", ".join(unknown[:10]) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
        raise CheckpointError(
            f"{url} holds files that are neither ours nor standard Hugging Face files: {shown}. "
            "Nothing was changed; move them away, or save to another path"
        )


def carried(old: Iterable[str], new: Collection[str]) -> list[str]:
    """Return the files of an old checkpoint that the new checkpoint keeps: config, tokenizer and similar files.

    Args:
        old: The names of all files of the old checkpoint.
        new: The names of the files that were written anew.
    """
    return sorted(name for name in old if name not in new and is_beside_weights(name))


def is_of_tokenizer(name: str) -> bool:
    """Return whether a file name in a model's folder belongs to its tokenizer or processor.

    It does if tokenizers are known to have such a file, and if it is JSON of no other known kind.
    """
    is_json = name.endswith(".json") and "/" not in name and not _matches(name, _NOT_OF_TOKENIZER)
    return is_json or _matches(name, _OF_TOKENIZER)


def is_standard(name: str) -> bool:
    """Return whether a file name is that of a weight, config or tokenizer file of transformers."""
    return _WEIGHTS.fullmatch(name) is not None or is_beside_weights(name)


def check_name(name: str) -> str:
    """Check, and give back, the name of a file in a checkpoint: plain, in at most one plain folder.

    Raises:
        ValueError: Any other name; it might lead out of the checkpoint.
    """
    parts = name.split("/")
    # A manifest may come from a stranger: "../../.ssh/config" must not be written.
    if len(parts) > 2 or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"{name!r} is no name of a checkpoint's file: it must be 'file' or 'folder/file'")
    return name


def parents(names: Iterable[str]) -> list[str]:
    """Return the subfolders of some file names."""
    return sorted({str(PurePosixPath(check_name(name)).parent) for name in names} - {"."})


BEGUN = "par_checkpoint.begun"
"""In a generation: shows it to all ranks, where the store does not name its uploads to them."""

SHOWN = "par_checkpoint.index.json"
"""In a generation: the index for transformers, as it is put in the target."""


@dataclass(frozen=True)
class Remnant:
    """Hidden folder next to a checkpoint that belongs to a save to it.

    Args:
        target: Name of the checkpoint's folder.
        kind: "tmp": not readable. "old": the checkpoint as it was before the save. "lease": the saver's lease.
        nonce: Name of the save, letters and digits.
    """

    target: str
    kind: str
    nonce: str

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9A-Za-z]+", self.nonce):
            raise ValueError(f"nonce {self.nonce!r} must be letters and digits")

    @property
    def name(self) -> str:
        """The name of the folder."""
        return f".{self.target}.{self.kind}-{self.nonce}"


def remnant_of(name: str) -> Remnant | None:
    """Return the remnant with a folder's name; None if the name is not one of a save."""
    # Leases are left out: a sweep removes one only after all folders of its save.
    match = re.fullmatch(r"\.(.+)\.(tmp|old)-([0-9A-Za-z]+)", name)
    return None if match is None else Remnant(*match.groups())


def is_data(name: str) -> bool:
    """Return whether a file name is that of a checkpoint's tensors or state, or of an index of such files."""
    ours = (SIDE_FILE, *OBJECTS.values())
    return name in ours or name.startswith("optimizer/") or _WEIGHTS.fullmatch(name) is not None


def _in_generation(name: str) -> str:
    """Return a file's name without its generation, a subfolder that exists after a copy from an object store."""
    first, _, rest = name.partition("/")
    return rest if rest and GENERATION.fullmatch(first) else name


def _named_in(manifest: bytes | None) -> set[str]:
    if manifest is None:
        return set()
    try:
        # A corrupt manifest vouches for no names; files with standard names may be replaced all the same.
        decoded = decode_manifest(manifest)
    except CorruptError:
        return set()
    return {*decoded.files, *decoded.beside}


def is_beside_weights(name: str) -> bool:
    """Return whether a file name belongs to a model and holds no tensors: its config, tokenizer, code or licence."""
    return _matches(name, _BESIDE_WEIGHTS)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    # The `*` of fnmatch matches "/" too, so a pattern is compared only with names of its own depth.
    alike = (pattern for pattern in patterns if pattern.count("/") == name.count("/"))
    return any(fnmatchcase(name, pattern) for pattern in alike)
