import os
import subprocess
import sys

import pytest

from par_train.run.output import open_missing_streams, say


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


@pytest.mark.ranks(1, init=False)
def test_a_process_without_standard_streams_gets_some_that_lead_nowhere(tmp_path):
    os.closerange(0, 3)
    sys.stdin = sys.stdout = sys.stderr = None
    open_missing_streams()
    with (tmp_path / "file").open("w") as file:
        assert file.fileno() > 2
        say("a line")
        say("a line", sys.stderr)
        assert sys.stdin.read() == ""
    assert (tmp_path / "file").read_text() == ""


def test_the_command_opens_them_before_all_else(tmp_path):
    """As with `<&- >&- 2>&-`; a file says what became of the numbers."""
    check = f"[os.fstat(n) for n in range(3)] and open({str(tmp_path / 'well')!r}, 'w')"
    look = f"import atexit, os, runpy, sys; atexit.register(lambda: {check}); sys.argv[1:] = ['--help']"
    command = f"{look}; runpy.run_module('par_train', run_name='__main__')"
    close = f"import os, sys; os.closerange(0, 3); os.execv(sys.executable, [sys.executable, '-c', {command!r}])"
    subprocess.run([sys.executable, "-c", close], check=True)
    assert (tmp_path / "well").exists()
