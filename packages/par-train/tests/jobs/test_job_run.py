"""The run of the byte GPT, where it is not seen in whole runs."""

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_train import register_gradient_handler
from par_train._errors import UserError
from par_train.jobs.byte_rows import text_rows
from par_train.jobs.job_run import _make_trainer
from par_train.jobs.options import DataOptions, ModelOptions, Options
from par_train.jobs.text import read_text


def broken(model, optimizer, groups):
    """A gradient handler with a mistake of its own."""
    return int("a bug")


@pytest.mark.ranks(2)
def test_mistakes_of_the_user_are_told_from_those_of_a_handler(tmp_path):
    folder = tmp_path / str(dist.get_rank())  # of this rank alone: a file that the other one writes may be empty yet
    folder.mkdir()
    (folder / "words.txt").write_text("all the words that there are " * 40)
    sizes = {"model": ModelOptions(width=8, layers=1, heads=2, context=8), "device": "cpu"}
    data = text_rows(Options(**sizes), read_text(DataOptions(folder=str(folder))))

    def refused(kind, words, **changes):
        with ProcessGroups(Topology.from_config({}, 2)) as groups, pytest.raises(ValueError, match=words) as raised:
            _make_trainer(Options(**sizes, **changes), data, None, groups, torch.device("cpu"))
        assert raised.type is kind

    refused(UserError, "'tf32' needs the TF32 units of an NVIDIA GPU", precision="tf32")
    refused(UserError, "no gradient handler is called 'mine'", gradient_handlers=({"type": "mine"},))
    refused(UserError, "no plugin is called 'mine'", plugins=("mine",))
    register_gradient_handler("broken")(broken)
    refused(ValueError, "invalid literal for int", gradient_handlers=({"type": "broken"},))
