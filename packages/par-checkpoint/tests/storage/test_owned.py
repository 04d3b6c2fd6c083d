import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_checkpoint._errors import CheckpointError
from par_checkpoint.format.manifest import Manifest, encode_manifest, record_of
from par_checkpoint.storage.owned import Remnant, carried, check_name, check_replaceable, parents, remnant_of

FOREIGN = ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "merges.txt", "spiece.model"]
WEIGHTS = [
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.fp16.safetensors",
    "model.fp16-00001-of-00002.safetensors",
    "model-00001-of-00002.fp16.safetensors",
    "model.safetensors.index.json",
    "model.safetensors.index.fp16.json",
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
]


def manifest_of(*names):
    files = {name: record_of(b"", 1 << 20) for name in names}
    return encode_manifest(
        Manifest(style="torch", files=files, tied={}, model=None, optimizer=None, scheduler=None, extra=None)
    )


def test_standard_files_may_be_replaced_without_a_manifest():
    check_replaceable("run", FOREIGN + WEIGHTS, None)


def test_what_the_manifest_names_may_be_replaced():
    names = ["odd", "optimizer/optimizer-00001-of-00001.safetensors", "par_checkpoint.json"]
    check_replaceable("run", names, manifest_of(*names[:2]))
    with pytest.raises(CheckpointError, match=r"Hugging Face files: odd\. Nothing was changed"):
        check_replaceable("run", names, manifest_of(names[1]))


@pytest.mark.parametrize(
    "name", ["notes.txt", "model_backup.safetensors", "data/config.json", "optimizer/x.safetensors", "a.py", "shard-1"]
)
def test_anything_else_is_refused_by_name(name):
    with pytest.raises(CheckpointError, match=name):
        check_replaceable("run", ["config.json", name], None)


def test_a_broken_manifest_vouches_for_nothing():
    with pytest.raises(CheckpointError, match="odd"):
        check_replaceable("run", ["odd"], manifest_of("odd")[:-3])


def test_a_long_list_is_cut():
    with pytest.raises(CheckpointError, match="a09 and 15 more"):
        check_replaceable("run", [f"a{number:02d}" for number in range(25)], None)


def test_config_and_tokenizer_are_carried_unless_written_anew():
    old = [*FOREIGN, *WEIGHTS, "par_checkpoint.json", "optimizer/tokenizer.json"]
    assert carried(old, ["config.json", "model.safetensors"]) == sorted(set(FOREIGN) - {"config.json"})


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "a/", "../a", "a/../b", "a/b/c", "a//b", "a\0"])
def test_names_that_might_lead_elsewhere_are_refused(name):
    with pytest.raises(ValueError, match="is no name of a checkpoint's file"):
        check_name(name)


def test_sub_folders_are_found_from_names():
    assert parents(["a", "optimizer/a", "optimizer/b"]) == ["optimizer"]


@given(st.from_regex(r"[.\-a-z0-9]+", fullmatch=True), st.sampled_from(["tmp", "old"]), st.uuids())
def test_a_remnant_is_read_from_its_name(target, kind, nonce):
    remnant = Remnant(target, kind, nonce.hex)
    assert remnant_of(remnant.name) == remnant


@pytest.mark.parametrize("name", ["run", ".run", ".run.tmp-", ".run.new-1", ".run.tmp-1.2", "run.tmp-1"])
def test_other_names_are_no_remnants(name):
    assert remnant_of(name) is None
