"""State in a manifest that somebody else wrote: refused by a typed error before anything has changed."""

import json

import pytest
import torch
from torch import nn

import par_checkpoint as pc
from par_checkpoint.format.manifest import head_of


def rewrite(path, change):
    """Changes fields of a manifest, whose own checksum is right again."""
    fields = json.loads((path / "par_checkpoint.json").read_text())
    fields.pop("checksum")
    change(fields)
    rest = (", " + json.dumps(fields)[1:]).encode()
    (path / "par_checkpoint.json").write_bytes(head_of(rest) + rest)


def parts():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def group(fields):
    return fields["optimizer"]["groups"][0]


CHANGES = {
    "optimizer is a number": lambda f: f.update(optimizer=1),
    "optimizer has no groups": lambda f: f["optimizer"].pop("groups"),
    "groups are a mapping": lambda f: f["optimizer"].update(groups={}),
    "slots are a list": lambda f: f["optimizer"].update(slots=[]),
    "a group is a list": lambda f: f["optimizer"].update(groups=[[]]),
    "a group has no params": lambda f: group(f).pop("params"),
    "a name is a list": lambda f: group(f)["params"].append([]),
    "options are null": lambda f: group(f).update(options=None),
    "options are a list": lambda f: group(f).update(options=[1]),
    "options have a number as a key": lambda f: group(f).update(options={"$dict": [[1, 2]]}),
    "options hold params": lambda f: group(f)["options"].update(params=[]),
    "options refer to no tensor": lambda f: group(f)["options"].update(lr={"$tensor": "none"}),
    "a slot is of no type": lambda f: f["optimizer"]["slots"].update({"weight.x": {"$nothing": 1}}),
    "model is true": lambda f: f.update(model=True),
    "model is a list": lambda f: f.update(model=[1]),
    "scheduler is a number": lambda f: f.update(scheduler=5),
    "scheduler is a text": lambda f: f.update(scheduler="x"),
    "extra is of no type": lambda f: f.update(extra={"$complex": 3}),
    "extra is too much": lambda f: f.update(extra={"$int": "zz"}),
    "beside is a number": lambda f: f.update(beside=3),
    "beside leads elsewhere": lambda f: f.update(beside={"../x": None}),
    "beside has no record": lambda f: f.update(beside={"x": 3}),
    "files lack a shard": lambda f: f["files"].pop(max(name for name in f["files"] if name.startswith("optimizer/"))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_load_of_a_manifest_of_another_shape_is_refused(tmp_path, change):
    pc.save(tmp_path / "x", **parts())
    rewrite(tmp_path / "x", CHANGES[change])
    into = parts()
    before = {name: each.clone() for name, each in into["model"].state_dict().items()}
    with pytest.raises(pc.CheckpointError):
        pc.load(tmp_path / "x", **into)
    assert all(torch.equal(each, before[name]) for name, each in into["model"].state_dict().items())
    assert len(into["optimizer"].param_groups[0]["params"]) == 2


class Picky:
    """A scheduler that takes one kind of state alone."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = {**state}


@pytest.mark.ranks(2)
def test_load_of_state_that_a_scheduler_refuses_is_typed(tmp_path):
    pc.save(tmp_path / "x", model={"w": torch.ones(2)}, scheduler=Picky(5))
    with pytest.raises(pc.CheckpointError, match=r"the Picky does not take its saved state .*is now undefined"):
        pc.load(tmp_path / "x", model={"w": torch.ones(2)}, scheduler=Picky(5))
