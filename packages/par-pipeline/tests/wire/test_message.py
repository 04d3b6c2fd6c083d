"""A message fits into the buffer that waits for it, and says what it is."""

import pytest
import torch

from par_pipeline._errors import Failure
from par_pipeline._program import STATUS, Message, sum_message
from par_pipeline._structure import aligned, flatten
from par_pipeline.schedules.actions import Action
from par_pipeline.wire.lanes import APART, FIRST, REST
from par_pipeline.wire.message import HEADER, Expectations, Header, encode, encode_apart, encode_failure

CPU = torch.device("cpu")
OUTPUT = Message(gradient=False, stage=1, microbatch=0)
VALUES = [
    torch.arange(15.0).view(3, 5),
    torch.arange(15.0).view(3, 5).t(),
    torch.tensor(7),
    torch.zeros(0, 3),
    (torch.ones(17, dtype=torch.bfloat16), None, torch.arange(123)),
    {"a": torch.tensor([True, False]), "b": [torch.ones(3, dtype=torch.complex64), "text"]},
    (torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j, 3 - 4j]).conj().imag),  # bytes of other values
    None,
    (),
]


def expecting(message, *signatures):
    """What is known of a message that had these signatures, one after the other."""
    expectations = Expectations()
    for signature in signatures:
        expectations.note(message, signature)
    return expectations


def received(value, expected, room=None):
    """The value as it arrives in a buffer of so many bytes, and how many parts it had."""
    tensors, signature = flatten(value)
    if room is None:
        room = HEADER if expected is None else expecting(OUTPUT, expected).room_for(OUTPUT, are_apart=False)
    parts = dict(encode(signature, tensors, expected, room))
    first, rest = parts.pop(FIRST), parts.pop(REST, None)
    assert len(first) <= room
    assert not parts
    buffer = torch.full((room,), 255, dtype=torch.uint8)
    buffer[: len(first)] = first
    header = Header(buffer, buffer[0].item())
    assert header.failure is None
    assert header.follows == (rest is not None)
    if rest is not None:
        assert len(rest) == header.description + header.body
    found, tensors = header.decode(expected, rest)
    assert found == signature
    return found.build(tensors), 1 if rest is None else 2


def assert_same(one, other):
    torch.testing.assert_close(flatten(one)[0], flatten(other)[0], rtol=0, atol=0)
    assert flatten(one)[1] == flatten(other)[1]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_arrives_as_it_was_whatever_was_expected(value):
    for expected in (None, *(flatten(each)[1] for each in VALUES)):
        found, messages = received(value, expected)
        assert_same(found, value)
        if expected == flatten(value)[1]:
            assert messages == 1


@pytest.mark.parametrize("value", VALUES)
def test_tensors_may_come_apart_in_as_many_bytes_as_are_waited_for(value):
    tensors, signature = flatten(value)
    for expected in (None, signature, flatten(torch.zeros(1000))[1], flatten(torch.zeros(0))[1]):
        ahead = None if expected is None else expected.size
        parts = dict(encode_apart(signature, tensors, expected, ahead, CPU))
        first, rest, apart = parts[FIRST], parts.get(REST), parts.get(APART)
        assert len(first) == HEADER == Expectations().room_for(OUTPUT, are_apart=True)
        assert (0 if apart is None else len(apart)) == (signature.size if ahead is None else ahead)
        header = Header(first, first[0].item())
        assert header.follows == (expected != signature) == (rest is not None)
        too_large = ahead is not None and signature.size > ahead
        if rest is not None:  # what the host reads, and tensors that have no room elsewhere
            assert header.body == signature.size
            assert len(rest) == header.description + (header.body if too_large else 0)
        found, arrived = header.decode(expected, rest, None if too_large else apart)
        assert_same(found.build(arrived), value)


def test_a_receive_is_posted_for_what_has_kept_its_size():
    small, large = (flatten(torch.zeros(size))[1] for size in (10, 1000))
    other = flatten(torch.zeros(2, 5))[1]
    for seen, ahead in (
        ([], None),  # nothing is known
        ([small], small.size),
        ([small, other], small.size),
        ([small, large], None),  # it may change again
        ([small, large, large], large.size),
        ([small, large, large, small, small], small.size),
    ):
        assert expecting(OUTPUT, *seen).bytes_ahead(OUTPUT) == ahead
        assert expecting(sum_message(0), *seen).bytes_ahead(sum_message(0)) is None  # which is as large as parameters
    assert Expectations().bytes_ahead(STATUS) == 0


def test_what_is_new_but_fits_comes_in_one_message():
    large = flatten(torch.zeros(1000))[1]
    found, messages = received(torch.ones(3), large)
    assert torch.equal(found, torch.ones(3))
    assert messages == 1
    assert received(torch.ones(2000), large)[1] == 2


def test_what_is_wider_than_the_border_dtype_is_sent_in_it_and_arrives_in_its_own():
    value = (torch.arange(123) / 7, torch.ones(17, dtype=torch.bfloat16), torch.arange(15))
    tensors, signature = flatten(value, border=torch.bfloat16)
    assert flatten(value, signature, torch.bfloat16)[1] is signature
    assert signature.size == aligned(2 * 123) + aligned(2 * 17) + aligned(8 * 15)
    room = expecting(OUTPUT, signature).room_for(OUTPUT, are_apart=False)
    ((_, message),) = encode(signature, tensors, signature, room)
    assert len(message) == room
    _, found = Header(message, message[0].item()).decode(signature)
    assert_same(tuple(found), (value[0].bfloat16().float(), *value[1:]))


def test_what_was_expected_may_find_a_buffer_that_was_made_for_something_else():
    value = (torch.arange(300.0), torch.ones(17, dtype=torch.bfloat16))
    expected = flatten(value)[1]
    needed = expecting(OUTPUT, expected).room_for(OUTPUT, are_apart=False)
    for room, messages in ((HEADER, 2), (needed - 1, 2), (needed, 1), (needed + 1, 1), (2 * needed, 1)):
        found, sent = received(value, expected, room)
        assert_same(found, value)
        assert sent == messages


def test_a_failure_fits_into_any_buffer_with_its_words():
    failure = Failure.of(ValueError("ä" * 1000), 123456, Action("F", 123456, 123456))
    message = encode_failure(failure)
    assert len(message) == HEADER == Expectations().room_for(OUTPUT, are_apart=False)
    assert Header(message, message[0].item()).failure == failure


def test_no_buffer_waits_for_gradients_of_shared_parameters_which_are_as_large_as_they_are():
    signature = flatten((torch.zeros(1000),))[1]
    for message, room in ((sum_message(0), HEADER), (OUTPUT, HEADER + signature.size)):
        assert expecting(message, signature).room_for(message, are_apart=False) == room
