"""Commands in forked processes are what new processes are, as far as tests of commands see."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

SAY = """
import os, sys
print(sys.argv[1:], os.getcwd(), sorted(each for each in os.environ if each.startswith("TEST_")), faulty, __name__)
print("a complaint", file=sys.stderr)
sys.exit(3)
"""
PAUSE = """
import signal
open("begun", "w").close()
signal.pause()
"""
FAIL = """
import os, sys
rank, group = os.environ["RANK"], os.getpgid(0) == os.getpid()
name = open("/proc/self/comm").read().strip() == f"rank of {os.getppid()}"
open(f"rank-{rank}", "w").write(f"{os.getppid()} {'torch' in sys.modules} {name} {group}")
sys.exit(7 * int(rank))
"""


@pytest.fixture
def start(tmp_path, warm_python):
    def start_script(source, *arguments, before=(), **options):
        (tmp_path / "script.py").write_text(source)
        environment = {**os.environ, "TEST_MINE": "1"}
        return warm_python.start(
            [*before, "script.py", *arguments], folder=tmp_path, environment=environment, **options
        )

    return start_script


def test_a_script_gets_its_words_environment_and_folder_and_its_output_and_exit_code_come_back(start, tmp_path):
    process = start(SAY, "one", "--two", before=["-u"], first="import builtins; builtins.faulty = True")
    out, err = process.communicate(timeout=120)
    assert out == f"['one', '--two'] {tmp_path} ['TEST_MINE'] True __main__\n"
    assert (err, process.returncode) == ("a complaint\n", 3)
    assert "TEST_MINE" not in os.environ


def test_a_signal_ends_it(start, tmp_path, eventually):
    process = start(PAUSE)
    eventually((tmp_path / "begun").exists)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == -signal.SIGTERM
    process.send_signal(signal.SIGTERM)  # which nobody gets
    process.kill()


def test_a_launcher_forks_the_ranks_that_it_may_and_starts_the_others(start, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = start(FAIL, before=torchrun, ranks=1)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "exitcode  : 7" in err
    assert (tmp_path / "rank-0").read_text() == f"{process.pid} True True True"
    assert (tmp_path / "rank-1").read_text() == f"{process.pid} False False True"


def test_spare_ranks_end_with_their_launcher(start, eventually):
    process = start("import os; print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read())", ranks=3)
    out, _ = process.communicate(timeout=120)
    spares = [Path("/proc", each, "cmdline") for each in out.split()]
    assert len(spares) == 3
    eventually(lambda: not any(has_words(each) for each in spares))


def has_words(command_line):
    """Whether the process lives: one that has ended, and nobody has asked for, has an empty command line."""
    try:
        return command_line.read_bytes() != b""
    except OSError:
        return False
