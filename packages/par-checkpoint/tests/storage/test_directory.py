import json

import pytest
import torch
from crc32c import crc32c
from safetensors.torch import save

from par_checkpoint._errors import CheckpointError, CorruptError
from par_checkpoint.format.manifest import FileRecord, Manifest, encode_index, record_of
from par_checkpoint.storage.directory import StoredTensor, read_directory

A, B = torch.arange(4.0), torch.arange(6).view(2, 3)
FIRST, SECOND = save({"a": A}, {"format": "pt"}), save({"b": B}, {"format": "pt"})
NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
SHARDED = {
    NAMES[0]: FIRST,
    NAMES[1]: SECOND,
    INDEX: encode_index({"a": NAMES[0], "b": NAMES[1]}, 64, 10),
}


class Memory:
    """A folder in memory that notes what is read of it."""

    url = "memory://folder"
    in_flight = 0
    dangling = ()

    def __init__(self, files):
        self.files, self.reads = dict(files), []

    def sizes(self):
        return {name: len(data) for name, data in self.files.items()}

    def read(self, name, begin=0, end=None):
        self.reads.append(name)
        return self.files[name][begin:end]


def record(data):
    begin = 8 + int.from_bytes(data[:8], "little")
    rest = record_of(data[begin:], 16)
    return FileRecord(size=len(data), data_begin=begin, header_crc=crc32c(data[:begin]), block=16, crcs=rest.crcs)


def manifest_of(files):
    records = {
        name: record(data) if name.endswith("safetensors") else record_of(data, 16) for name, data in files.items()
    }
    none = dict.fromkeys(("model", "optimizer", "scheduler", "extra"))
    return Manifest(style="huggingface", files=records, tied={}, **none)


def found(files, **options):
    return read_directory(Memory(files), **options)


def names(files):
    """Where the bytes at each place lead."""
    directory = found(files)
    return {name: files[place.file][place.begin : place.end] for name, place in directory.places.items()}


def test_a_single_file_is_found():
    directory = found({"model.safetensors": FIRST, "config.json": b"{}"})
    begin = len(FIRST) - 16
    assert directory.places == {"a": StoredTensor("model.safetensors", torch.float32, (4,), begin, begin + 16)}
    assert (directory.pickles, directory.index) == ((), None)


def test_places_lead_to_the_bytes():
    assert names(SHARDED) == {"a": FIRST[-16:], "b": SECOND[-48:]}


def test_several_files_are_found_by_their_index():
    directory = found(SHARDED)
    assert directory.index == INDEX
    assert {name: place.file for name, place in directory.places.items()} == {"a": NAMES[0], "b": NAMES[1]}


def test_variants_have_names_of_their_own():
    index = encode_index({"a": "model.fp16-00001-of-00001.safetensors"}, 16, 4)
    single = {"model.safetensors": SECOND, "model.fp16.safetensors": FIRST}
    assert list(found(single, variant="fp16").places) == ["a"]
    several = {"model.fp16-00001-of-00001.safetensors": FIRST, "model.safetensors.index.fp16.json": index}
    assert found(several, variant="fp16").index == "model.safetensors.index.fp16.json"
    pickles = {"pytorch_model.fp16.bin": b"", "pytorch_model.bin": b""}
    assert found(pickles, variant="fp16").pickles == ("pytorch_model.fp16.bin",)
    with pytest.raises(CheckpointError, match=r"model\.bf16\.safetensors.*It has: model\.fp16\.safetensors"):
        found(single, variant="bf16")


@pytest.mark.parametrize("variant", ["", "../x", "a/b", ".x"])
def test_a_variant_is_part_of_a_name(variant):
    with pytest.raises(ValueError, match="variant"):
        found({}, variant=variant)


def test_an_optimizer_has_a_folder_of_its_own():
    file = "optimizer/optimizer-00001-of-00001.safetensors"
    index = encode_index({"a": "optimizer-00001-of-00001.safetensors"}, 16, 4)
    files = {**SHARDED, file: FIRST, "optimizer/optimizer.safetensors.index.json": index}
    directory = found(files, stem="optimizer/optimizer", manifest=manifest_of(files))
    assert directory.places["a"].file == file
    assert directory.index == "optimizer/optimizer.safetensors.index.json"
    with pytest.raises(CheckpointError, match="no weights"):
        found({**SHARDED, "pytorch_model.bin": b""}, stem="optimizer/optimizer")


def test_pickles_are_found_but_safetensors_come_first():
    index = json.dumps(
        {"weight_map": {"b": "pytorch_model-2.bin", "a": "pytorch_model-1.bin", "c": "pytorch_model-1.bin"}}
    )
    several = {"pytorch_model.bin.index.json": index.encode(), "pytorch_model-1.bin": b"1", "pytorch_model-2.bin": b"2"}
    directory = found(several)
    assert directory.pickles == ("pytorch_model-1.bin", "pytorch_model-2.bin")
    assert (dict(directory.places), directory.index) == ({}, "pytorch_model.bin.index.json")
    assert found({"pytorch_model.bin": b""}).pickles == ("pytorch_model.bin",)
    assert found({"model.pt": b""}).pickles == ("model.pt",)
    assert found({**several, "model.safetensors": FIRST}).pickles == ()


def test_a_stale_single_file_beside_new_ones_is_an_error():
    with pytest.raises(CheckpointError, match=f"both model.safetensors and {INDEX}"):
        found({**SHARDED, "model.safetensors": FIRST})
    with pytest.raises(CheckpointError, match=r"both pytorch_model\.bin and"):
        found({"pytorch_model.bin": b"", "pytorch_model.bin.index.json": b"{}"})


def test_the_manifest_says_which_of_two_is_stale():
    both = {**SHARDED, "model.safetensors": FIRST}
    assert found(both, manifest=manifest_of(SHARDED)).index == INDEX
    assert found(both, manifest=manifest_of({"model.safetensors": FIRST})).index is None


def test_a_stale_file_does_not_stand_in_for_what_the_manifest_lists():
    with pytest.raises(CorruptError, match=f"{INDEX}: is missing"):
        found({"model.safetensors": FIRST}, manifest=manifest_of(SHARDED))


def test_shard_that_the_manifest_does_not_list_is_refused():
    listed = {name: data for name, data in SHARDED.items() if name != NAMES[1]}
    with pytest.raises(CorruptError, match=rf"{NAMES[1]}: is in {INDEX}, but par_checkpoint.json does not list it"):
        found(SHARDED, manifest=manifest_of(listed))


def test_a_manifest_without_weights_leaves_those_of_others():
    assert list(found({"model.safetensors": FIRST}, manifest=manifest_of({})).places) == ["a"]


def test_an_empty_folder_is_told_from_a_wrong_one():
    with pytest.raises(CheckpointError, match=r"model\.safetensors, .*pytorch_model\.bin.* It has: nothing"):
        found({})
    with pytest.raises(CheckpointError, match=r"It has: README, x\.gguf"):
        found({"x.gguf": b"", "README": b""})


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(name, with_manifest):
    files = {key: data for key, data in SHARDED.items() if key != name}
    with pytest.raises(CorruptError, match=f"{name}: is missing"):
        found(files, manifest=manifest_of(SHARDED) if with_manifest else None)


def test_a_missing_pickle_is_named():
    index = json.dumps({"weight_map": {"b": "pytorch_model-2.bin"}}).encode()
    with pytest.raises(CorruptError, match=r"pytorch_model-2\.bin: is missing"):
        found({"pytorch_model.bin.index.json": index})


def test_a_key_that_is_not_in_its_file_is_an_error():
    index = encode_index({"a": NAMES[0], "c": NAMES[0], "b": NAMES[1]}, 1, 1)
    with pytest.raises(CorruptError, match=f"'c' is in {NAMES[0]}, but it is not there"):
        found({**SHARDED, INDEX: index})


@pytest.mark.parametrize("weight_map", [{"a": NAMES[0], "b": NAMES[1]}, {"b": NAMES[1], "a": NAMES[0]}])
def test_a_key_that_the_index_does_not_know_is_an_error(weight_map):
    files = {**SHARDED, NAMES[1]: save({"b": B, "late": A}), INDEX: encode_index(weight_map, 1, 1)}
    with pytest.raises(CorruptError, match=f"does not say that 'late' is in {NAMES[1]}"):
        found(files)


def test_a_key_in_two_files_is_an_error():
    with pytest.raises(CorruptError, match="'a' is in"):
        found({**SHARDED, NAMES[1]: save({"b": B, "a": A})})


def test_an_index_cannot_lead_out_of_the_folder():
    folder = Memory({"model.safetensors.index.json": encode_index({"a": "../secret.safetensors"}, 1, 1)})
    folder.files["../secret.safetensors"] = FIRST
    with pytest.raises(CorruptError, match="only plain names"):
        read_directory(folder)
    assert folder.reads == [INDEX]


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("name", [*NAMES, INDEX])
def test_a_flipped_byte_of_header_or_index_names_the_file(name):
    manifest = manifest_of(SHARDED)
    for at in range(manifest.files[name].data_begin or len(SHARDED[name])):
        with pytest.raises(CorruptError, match=f"{name}: .*does not match its checksum"):
            found({**SHARDED, name: flipped(SHARDED[name], at)}, manifest=manifest)


@pytest.mark.parametrize("name", [*NAMES, INDEX])
def test_another_size_than_the_manifest_says_names_the_file(name):
    for data in (SHARDED[name][:-1], SHARDED[name] + b" "):
        with pytest.raises(CorruptError, match=f"{name}: has {len(data)} bytes, but"):
            found({**SHARDED, name: data}, manifest=manifest_of(SHARDED))


def test_sizes_of_pickles_are_checked():
    with pytest.raises(CorruptError, match=r"model\.pt: has 1 bytes"):
        found({"model.pt": b"1"}, manifest=manifest_of({"model.pt": b"22"}))


def test_a_truncated_file_of_others_is_named():
    with pytest.raises(CorruptError, match=f"memory://folder/{NAMES[1]}"):
        found({**SHARDED, NAMES[1]: SECOND[:-1]})


def test_a_record_with_another_begin_is_refused():
    manifest = manifest_of(SHARDED)
    begin = manifest.files[NAMES[0]].data_begin + 1
    wrong = FileRecord(size=len(FIRST), data_begin=begin, header_crc=crc32c(FIRST[:begin]), block=16, crcs=(0,))
    changed = Manifest(**{**vars(manifest), "files": {**manifest.files, NAMES[0]: wrong}})
    with pytest.raises(CorruptError, match=f"not {begin}"):
        found(SHARDED, manifest=changed)
