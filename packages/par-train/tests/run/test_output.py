import os

from par_train.run.output import say


def test_a_reader_that_is_gone_takes_nothing_along():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        for _ in range(2):
            say("a line", stream)
        print("another, by somebody else", file=stream, flush=True)


def test_a_line_is_out_at_once(capfd):
    say("a line")
    assert capfd.readouterr().out == "a line\n"
