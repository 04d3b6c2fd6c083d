import json

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

import par_checkpoint
from par_checkpoint._errors import CheckpointError, CorruptError
from par_checkpoint.format.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    block_ranges,
    decode_manifest,
    encode_manifest,
    record_of,
)

RECORD = FileRecord(size=25, data_begin=8, header_crc=0xDEADBEEF, block=10, crcs=(1, 2**32 - 1))


def manifest(**changes):
    fields = {
        "style": "huggingface",
        "files": {"model.safetensors": RECORD, "optimizer/optimizer-00001-of-00001.safetensors": RECORD},
        "tied": {"lm_head.weight": "embed.weight"},
        "model": None,
        "optimizer": {"groups": [{"params": ["a"], "options": {"lr": 0.1}}], "slots": {}},
        "scheduler": {"$counter": [[1, 2]]},
        "extra": "\ud800ü\n",
        "step": 100,
        "beside": {"config.json": RECORD, "additional_chat_templates/a.jinja": None},
        "version": "0.1.0",
    }
    return Manifest(**{**fields, **changes})


def resealed(fields):
    """The bytes of any fields, with a checksum that is right."""
    body = (json.dumps(fields)[1:]).encode()
    body = b", " + body
    return b'{"checksum": "%08x"' % crc32c(body) + body


def fields_of(data):
    fields = json.loads(data)
    del fields["checksum"]
    return fields


def test_a_manifest_comes_back():
    assert decode_manifest(encode_manifest(manifest())) == manifest()


def test_a_manifest_of_nothing_comes_back():
    empty = manifest(files={}, tied={}, optimizer=None, scheduler=None, extra=None, step=None)
    assert decode_manifest(encode_manifest(empty)) == empty


def test_it_is_json_and_says_who_wrote_it(tmp_path):
    fields = json.loads(encode_manifest(manifest()))
    assert (fields["format"], fields["par_checkpoint"]) == (1, "0.1.0")
    par_checkpoint.save(tmp_path / "c", extra=1)
    assert json.loads((tmp_path / "c" / MANIFEST).read_bytes())["par_checkpoint"] == par_checkpoint.__version__
    assert fields["files"]["model.safetensors"]["crcs"] == "00000001ffffffff"


def test_a_change_to_any_byte_is_noticed():
    data = encode_manifest(manifest())
    for at, byte in enumerate(data):
        for flip in (1, 0x20, 0x80, byte ^ ord(" ")):
            if flip:
                changed = bytearray(data)
                changed[at] ^= flip
                with pytest.raises(CorruptError, match="its own checksum"):
                    decode_manifest(bytes(changed))


def test_a_missing_or_further_byte_is_noticed():
    data = encode_manifest(manifest())
    for broken in (*(data[:end] for end in range(len(data))), data + b" ", data + b"\0", b" " + data):
        with pytest.raises(CorruptError, match="its own checksum"):
            decode_manifest(broken)


def test_a_later_format_says_which_version_reads_it():
    fields = {**fields_of(encode_manifest(manifest())), "format": 2, "par_checkpoint": "7.0.1", "news": 1}
    with pytest.raises(CheckpointError, match=r"install par-checkpoint 7\.0\.1 or later") as caught:
        decode_manifest(resealed(fields))
    assert not isinstance(caught.value, CorruptError)


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/b", "optimizer/../x", "optimizer/", "optimizer/a/b", "optimizer/.x", ""]
)
def test_files_elsewhere_are_refused(name):
    with pytest.raises(CorruptError, match="no plain name"):
        decode_manifest(encode_manifest(manifest(files={name: RECORD})))


@pytest.mark.parametrize(
    "changes",
    [
        {"size": -1},
        {"size": True},
        {"size": 1.0},
        {"size": 7},
        {"size": 29},
        {"data_begin": 26},
        {"data_begin": None},
        {"block": 0},
        {"block": "10"},
        {"crcs": "00000001"},
        {"crcs": "0000000100000002 "},
        {"crcs": "0000000g00000002"},
        {"crcs": [1, 2]},
        {"header_crc": ""},
        {"header_crc": 1},
        {"more": 1},
    ],
)
def test_a_record_that_makes_no_sense_is_refused(changes):
    fields = fields_of(encode_manifest(manifest()))
    assert decode_manifest(resealed(fields)) == manifest()
    fields["files"]["model.safetensors"].update(changes)
    with pytest.raises(CorruptError, match=r"file 'model\.safetensors'"):
        decode_manifest(resealed(fields))


def test_a_header_is_not_read_into_memory_beyond_its_limit():
    record = FileRecord(size=10**12, data_begin=10**9, header_crc=0, block=10**12, crcs=(1,))
    with pytest.raises(CorruptError, match="do not fit"):
        decode_manifest(encode_manifest(manifest(files={"model.safetensors": record})))


@pytest.mark.parametrize(
    "changes",
    [
        {"style": 1},
        {"par_checkpoint": None},
        {"step": 1.5},
        {"step": True},
        {"files": []},
        {"tied": []},
        {"tied": {"a": 1}},
        {"beside": "a"},
        {"beside": ["../a"]},
        {"more": 1},
    ],
)
def test_other_kinds_of_fields_are_refused(changes):
    with pytest.raises(CorruptError, match=MANIFEST):
        decode_manifest(resealed({**fields_of(encode_manifest(manifest())), **changes}))


def test_a_tie_must_lead_to_what_is_stored():
    with pytest.raises(CorruptError, match="itself not stored"):
        decode_manifest(encode_manifest(manifest(tied={"a": "b", "b": "c"})))


def test_fields_must_all_be_there_and_once():
    fields = fields_of(encode_manifest(manifest()))
    del fields["scheduler"]
    with pytest.raises(CorruptError, match="scheduler"):
        decode_manifest(resealed(fields))
    body = b', "format": 1, "format": 1}'
    with pytest.raises(CorruptError, match="twice"):
        decode_manifest(b'{"checksum": "%08x"' % crc32c(body) + body)


def test_nan_is_never_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_manifest(manifest(extra=float("nan")))


@given(st.binary(max_size=50), st.integers(1, 12))
def test_a_record_covers_every_byte_once(data, block):
    record = record_of(data, block)
    ranges = list(block_ranges(record.size, record.data_begin, block))
    assert b"".join(data[begin:end] for begin, end in ranges) == data
    assert list(record.crcs) == [crc32c(data[begin:end]) for begin, end in ranges]
    assert record.header_crc == crc32c(b"")
    assert decode_manifest(encode_manifest(manifest(files={"x": record}))).files == {"x": record}


def test_blocks_begin_with_the_data():
    assert list(block_ranges(25, 8, 10)) == [(8, 18), (18, 25)]
    assert list(block_ranges(8, 8, 10)) == []
