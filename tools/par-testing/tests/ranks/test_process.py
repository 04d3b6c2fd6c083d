"""Ctrl-C while a rank starts does not lose the rank."""

import signal

import pytest

from par_testing.ranks.process import interrupts_later


@pytest.fixture(autouse=True)
def interruptible():
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    yield
    signal.signal(signal.SIGINT, usual)


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []

    def interrupted() -> None:
        with interrupts_later():
            signal.raise_signal(signal.SIGINT)
            done.append("block")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_changes():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_later():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
