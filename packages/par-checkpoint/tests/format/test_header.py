import json
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import _SIZE, _TYPES, load, save, save_file

from par_checkpoint._errors import CheckpointError, CorruptError
from par_checkpoint.format.header import _DTYPES, MAX_HEADER, HeaderEntry, decode_header, encode_header

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(max_size=6).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from([dtype for dtype in _DTYPES.values() if dtype in _SIZE]), SHAPES),
    max_size=6,
)


def zeros(tensors):
    return {name: torch.zeros(shape, dtype=torch.uint8).to(dtype) for name, (dtype, shape) in tensors.items()}


def decoded(data, size=None):
    return decode_header(lambda begin, end: data[begin:end], len(data) if size is None else size, "f.safetensors")


def raw(text, data=b""):
    text = text if isinstance(text, bytes) else text.encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4), **others):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **others}


def parts(data):
    """The header's text without padding, and the data."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end].rstrip(), data[end:]


@given(TENSORS)
def test_the_bytes_are_those_of_safetensors_but_for_padding(tensors):
    expected = save(zeros(tensors), {"format": "pt"})
    prefix, header = encode_header(tensors)
    assert parts(prefix) == (parts(expected)[0], b"")
    assert len(parts(expected)[1]) == header.data_size
    assert len(prefix) == header.data_begin
    assert decoded(expected).tensors == header.tensors


@given(TENSORS, st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3))
def test_safetensors_reads_what_is_written(tensors, metadata):
    prefix, header = encode_header(tensors, metadata)
    data = prefix + bytes(header.data_size)
    assume({dtype for dtype, _ in tensors.values()} <= set(_TYPES.values()))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in load(data).items()} == tensors
    assert decoded(data).metadata == metadata


def test_a_whole_file_is_equal_byte_by_byte_but_for_padding(tmp_path):
    tensors = {"b": torch.arange(6).view(2, 3), "a": torch.tensor(1.5), "c": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    prefix, header = encode_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    data = b"".join(bytes(tensors[name].reshape(-1).view(torch.uint8).tolist()) for name in header.tensors)
    assert parts(prefix + data) == parts((tmp_path / "x").read_bytes())


def test_offsets_are_contiguous_and_wide_elements_come_first():
    _, header = encode_header({"a": (torch.int8, (3,)), "z": (torch.float64, (2,)), "e": (torch.float64, (0, 5))})
    assert header.tensors == {
        "e": HeaderEntry(torch.float64, (0, 5), 0, 0),
        "z": HeaderEntry(torch.float64, (2,), 0, 16),
        "a": HeaderEntry(torch.int8, (3,), 16, 19),
    }


@pytest.mark.parametrize("length", range(70))
def test_the_data_begins_aligned_as_memory_is(length):
    prefix, header = encode_header({"a" * length: (torch.int8, (3,))})
    assert header.data_begin == len(prefix)
    assert header.data_begin % 64 == 0


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_files_cannot_hold_are_refused(name):
    with pytest.raises(ValueError, match="cannot be the name"):
        encode_header({name: (torch.int8, (1,))})


def test_complex128_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'w' is torch\.complex128"):
        encode_header({"w": (torch.complex128, (1,))})


def test_more_padding_is_legal():
    header = decoded(raw(json.dumps({"a": entry()}) + " " * 77, bytes(4)))
    assert header.tensors["a"] == HeaderEntry(torch.float32, (1,), 0, 4)


BROKEN = {
    "an unknown dtype": {"a": entry("F33")},
    "no dtype's name": {"a": entry(["F32"])},
    "a field too many": {"a": entry(more=1)},
    "a field too few": {"a": {"dtype": "F32", "shape": [1]}},
    "no fields": {"a": [1]},
    "a shape of texts": {"a": entry(shape="1")},
    "a shape of truth": {"a": entry(shape=[True])},
    "a shape of fractions": {"a": entry(shape=[1.0])},
    "a negative shape": {"a": entry(shape=[-1, -1])},
    "offsets backwards": {"a": entry(offsets=(4, 0))},
    "negative offsets": {"a": entry(offsets=(-4, 0))},
    "three offsets": {"a": entry(offsets=(0, 2, 4))},
    "truth as offset": {"a": entry("U8", (1,), (False, True)), "b": entry("U8", (3,), (1, 4))},
    "another size than the shape's": {"a": entry(shape=[2])},
    "a product over 64 bits": {"a": entry(shape=[2**32, 2**32, 1])},
    "a huge product that ends in zero bits": {"a": entry(shape=[2**40, 2**40, 2**40])},
    "a name that is no UTF-8": {"a\ud800": entry()},
    "a hole": {"a": entry("U8", (1,), (0, 1)), "b": entry("U8", (2,), (2, 4))},
    "a hole before the first": {"a": entry("U8", (3,), (1, 4))},
    "an overlap": {"a": entry("U8", (3,), (0, 3)), "b": entry("U8", (2,), (2, 4))},
    "the same bytes twice": {"a": entry(), "b": entry()},
    "bytes at the end that nobody has": {"a": entry("U8", (3,), (0, 3))},
    "an end beyond the file": {"a": entry(shape=[2], offsets=(0, 8))},
    "an empty tensor beyond the file": {"a": entry(), "b": entry(shape=[0], offsets=(8, 8))},
    "metadata that is no map": {"__metadata__": [], "a": entry()},
    "metadata with a number": {"__metadata__": {"x": 1}, "a": entry()},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_header_that_lies_is_refused(what):
    with pytest.raises(CorruptError, match=r"f\.safetensors"):
        decoded(raw(json.dumps(BROKEN[what]), bytes(4)))


@pytest.mark.parametrize("what", [what for what in BROKEN if what not in ("no fields", "metadata that is no map")])
def test_a_message_names_the_tensor(what):
    with pytest.raises(CorruptError, match=r"tensor 'a['\\]|tensor 'b'|__metadata__|it ends at"):
        decoded(raw(json.dumps(BROKEN[what]), bytes(4)))


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"12",
        b"{",
        b"\xff\xfe{\x00}\x00",
        b'{"a": NaN}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a":' * 200_000,
    ],
)
def test_what_is_no_strict_json_is_refused(text):
    with pytest.raises(CorruptError, match=r"f\.safetensors"):
        decoded(raw(text))


def test_duplicate_keys_are_refused_though_safetensors_takes_them():
    text = '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    with pytest.raises(CorruptError, match="'a' is there twice"):
        decoded(raw(text, bytes(4)))


def test_duplicate_fields_are_refused():
    with pytest.raises(CorruptError, match="'dtype' is there twice"):
        decoded(raw('{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4)))


@pytest.mark.parametrize("size", range(12))
def test_a_file_that_ends_in_its_header_is_refused(size):
    data = encode_header({"a": (torch.int8, (4,))})[0][:size]
    with pytest.raises(CorruptError, match="must be 2 to"):
        decoded(data)


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER + 1, 2**63, 2**64 - 1])
def test_the_length_of_a_header_is_checked_before_it_is_read(length):
    asked = []

    def read(begin, end):
        asked.append(end)
        return length.to_bytes(8, "little")

    with pytest.raises(CorruptError, match=f"header of {length}"):
        decode_header(read, 2**50, "f.safetensors")
    assert asked == [8]


def test_a_header_that_is_too_long_is_not_written():
    with pytest.raises(ValueError, match="lower max_shard_size"):
        encode_header({"a" * MAX_HEADER: (torch.int8, (1,))})


def test_elements_below_a_byte_are_refused_by_tensor_and_dtype():
    data = raw(json.dumps({"a": entry("F4", (4,), (0, 2))}), bytes(2))
    with pytest.raises(CheckpointError, match="tensor 'a': dtype F4"):
        decoded(data)


@given(TENSORS.filter(bool), st.data())
def test_any_truncation_is_noticed(tensors, data):
    prefix, header = encode_header(tensors)
    whole = prefix + bytes(header.data_size)
    with pytest.raises(CorruptError):
        decoded(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=40), st.integers(0, 39))
def test_random_bytes_never_fail_in_another_way(noise, at):
    good = encode_header({"a": (torch.int8, (4,)), "b": (torch.float32, (2, 2))})[0] + bytes(20)
    mixed = good[: 8 + at] + noise + good[8 + at + len(noise) :]
    try:
        header = decoded(mixed)
    except CheckpointError:
        return
    assert header.data_size == 20


@given(st.binary(min_size=1, max_size=3), st.integers(8, 150))
def test_whatever_is_accepted_safetensors_accepts(noise, at):
    good = encode_header({"a": (torch.int8, (4,)), "b": (torch.float32, (2, 2))})[0] + bytes(20)
    mixed = good[:at] + noise + good[at + len(noise) :]
    try:
        header = decoded(mixed)
    except CheckpointError:
        return
    try:
        theirs = load(mixed)
    except SafetensorError as error:
        pytest.fail(str(error))
    assert {name: tensor.numel() for name, tensor in theirs.items()} == {
        name: math.prod(stored.shape) for name, stored in header.tensors.items()
    }
