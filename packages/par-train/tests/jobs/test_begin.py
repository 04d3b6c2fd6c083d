from contextlib import ExitStack

import pytest
import torch.distributed as dist

from par_train._errors import UserError
from par_train.jobs.begin import find_start
from par_train.jobs.options import CheckpointOptions, DataOptions, ModelOptions, Options
from par_train.run.files import RunFiles
from par_train.run.lock import lock_folder
from par_train.run.stop import Stop


def options(folder, **changes):
    data = DataOptions(folder=str(folder / "text"))
    return Options(data=data, model=ModelOptions(context=16), output=str(folder / "out"), **changes)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "words.txt").write_text("all the words that there are " * 40)
    return tmp_path


@pytest.fixture
def occupied(folder):
    """A folder whose output another run, which is pytest, is writing."""
    files = RunFiles(folder / "out")
    files.folder.mkdir()
    with lock_folder(files):
        yield folder


@pytest.mark.ranks(3)
def test_all_ranks_are_told_that_another_run_is_writing(occupied):
    for changes in ({}, {"overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match=r"out' is being written by another run \(process"), ExitStack() as held:
            find_start(options(occupied, **changes), Stop(), held)


@pytest.mark.ranks(3)
def test_the_output_is_locked_until_the_run_ends(folder):
    for _ in range(2):
        with ExitStack() as held:
            start = find_start(options(folder), Stop(), held)
            assert start.origin is None
            with pytest.raises(UserError, match="another run"), lock_folder(RunFiles(folder / "out")):
                pass
            dist.barrier()  # every rank has looked
        dist.barrier()


@pytest.mark.ranks(3)
def test_what_one_rank_cannot_use_all_complain_about(folder):
    chosen = options(folder / "elsewhere" if dist.get_rank() == 1 else folder)
    with pytest.raises(UserError, match=r"rank 1: data\.folder: '.+elsewhere/text'"), ExitStack() as held:
        find_start(chosen, Stop(), held)


@pytest.mark.ranks(2)
def test_tiers_that_cannot_be_are_refused_on_every_rank_before_training_begins(folder):
    (folder / "file").write_text("")
    for tiers, copies, words in (
        (("near", "out", "out/../out"), 0, r"checkpoint\.tiers: .*all different|is another one, or lies in it"),
        (("near", "near/below"), 0, r"'.*near.*' is another one, or lies in it; give folders"),
        (("near", "file/below"), 0, "the tier '.*file/below/checkpoints' cannot be written on .*: Not a directory"),
        (("near", "out"), 2, r"copies is 2, but the ranks are on 1 host \("),
    ):
        chosen = CheckpointOptions(tiers=tuple(str(folder / tier) for tier in tiers), copies=copies)
        with pytest.raises(UserError, match=words), ExitStack() as held:
            find_start(options(folder, checkpoint=chosen), Stop(), held)
        dist.barrier()
    assert not (folder / "near").exists()
