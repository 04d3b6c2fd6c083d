"""A message fits into the buffer that waits for it, and says what it is."""

import pytest
import torch

from par_pipeline._errors import Failure
from par_pipeline._program import Message, sum_message
from par_pipeline._structure import aligned, flatten
from par_pipeline.schedules.actions import Action
from par_pipeline.wire.message import HEADER, Header, encode, encode_failure, room_for

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


def received(value, expected, room=None, *, are_apart=False):
    tensors, signature = flatten(value)
    room = room_for(OUTPUT, expected, are_apart=are_apart) if room is None else room
    parts = encode(signature, tensors, expected, room, CPU, are_apart=are_apart)
    assert len(parts[0]) <= room
    buffer = torch.full((room,), 255, dtype=torch.uint8)
    buffer[: len(parts[0])] = parts[0]
    header = Header(buffer, buffer[0].item())
    assert header.failure is None
    assert [len(each) for each in parts[1:]] == ([header.second] if header.second else [])
    found, tensors = header.decode(parts[1] if header.second else None, expected)
    assert found == signature
    return found.build(tensors), len(parts)


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


def test_tensors_may_come_in_messages_of_their_own():
    for value in VALUES:
        signature = flatten(value)[1]
        for expected in (None, signature, flatten(torch.zeros(1000))[1]):
            assert room_for(OUTPUT, expected, are_apart=True) == HEADER
            found, messages = received(value, expected, are_apart=True)
            assert_same(found, value)
            assert messages == (1 if expected == signature and signature.size == 0 else 2)


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
    room = room_for(OUTPUT, signature, are_apart=False)
    (message,) = encode(signature, tensors, signature, room, CPU, are_apart=False)
    assert len(message) == room
    _, found = Header(message, message[0].item()).decode(None, signature)
    assert_same(tuple(found), (value[0].bfloat16().float(), *value[1:]))


def test_what_was_expected_may_find_a_buffer_that_was_made_for_something_else():
    value = (torch.arange(300.0), torch.ones(17, dtype=torch.bfloat16))
    expected = flatten(value)[1]
    needed = room_for(OUTPUT, expected, are_apart=False)
    for room, messages in ((HEADER, 2), (needed - 1, 2), (needed, 1), (needed + 1, 1), (2 * needed, 1)):
        found, sent = received(value, expected, room)
        assert_same(found, value)
        assert sent == messages


def test_a_failure_fits_into_any_buffer_with_its_words():
    failure = Failure.of(ValueError("ä" * 1000), 123456, Action("F", 123456, 123456))
    message = encode_failure(failure)
    assert len(message) == HEADER == room_for(OUTPUT, None, are_apart=False)
    assert Header(message, message[0].item()).failure == failure


def test_no_buffer_waits_for_gradients_of_shared_parameters_which_are_as_large_as_they_are():
    signature = flatten((torch.zeros(1000),))[1]
    assert room_for(sum_message(0), signature, are_apart=False) == HEADER
    assert room_for(OUTPUT, signature, are_apart=False) > HEADER + 4000
