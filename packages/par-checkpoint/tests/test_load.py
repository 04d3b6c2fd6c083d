import contextlib
import json
import os
import pickle
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import CheckpointError, CorruptError, Format, Transfer, load, read_tensor, save
from par_checkpoint import _torch_private as private
from par_checkpoint import verify as check
from par_checkpoint.transfer.ranks import Ranks
from par_groups import Box, Sharding, on_written, set_sharding
from par_testing import storm

from .helpers import Pipeline2, Tensor2, make_model, rectangle, train

MIB4 = 1 << 20  # elements of float32 in a block


def unchanged(tensors):
    """A check that none of these tensors has changed."""
    copies = [tensor.detach().clone() for tensor in tensors]
    return lambda: all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


@pytest.fixture
def foreign(tmp_path):
    """A folder of somebody else's."""
    torch.manual_seed(0)
    state = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.arange(4)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    return state


@pytest.mark.ranks(2)
def test_everything_that_does_not_fit_is_listed_at_once_and_nothing_changes(tmp_path):
    torch.manual_seed(0)
    state = {"fits": torch.randn(3), "shape": torch.randn(2, 3), "dtype": torch.randn(4), "more": torch.randn(1)}
    save(tmp_path / "c", model=state)
    model = {"fits": torch.zeros(3), "shape": torch.zeros(3, 2), "dtype": torch.zeros(4).half(), "new": torch.zeros(1)}
    same = unchanged(list(model.values()))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", model=model)
    assert "nothing was changed" in str(caught.value)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "'shape' is torch.float32 (2, 3) in the checkpoint, torch.float32 (3, 2) in the model",
        "'dtype' is torch.float32 (4,) in the checkpoint, torch.float16 (4,) in the model",
        "missing in the checkpoint: new",
        "not wanted by anybody: more",
    ]
    assert same()
    report = load(tmp_path / "c", model=model, strict=False)
    assert (report.missing, report.unexpected) == (("new",), ("more",))
    assert [text.split()[0] for text in report.mismatched] == ["'shape'", "'dtype'"]
    assert torch.equal(model["fits"], state["fits"])
    assert all(model[name].count_nonzero() == 0 for name in ("shape", "dtype", "new"))


def test_an_error_of_many_names_is_cut_short(tmp_path):
    save(tmp_path / "c", model={"a": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="and 51 more") as caught:
        load(tmp_path / "c", model={f"n{i}": torch.zeros(1) for i in range(100)})
    assert len(str(caught.value).splitlines()) == 52


@pytest.mark.ranks(2)
def test_what_one_stage_lacks_another_may_have(tmp_path):
    run = Pipeline2()
    save(tmp_path / "c", model=run.model)
    names = ["0.weight", "0.bias"] if dist.get_rank() == 0 else ["2.weight", "3.bias"]
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", model={name: torch.zeros(run.whole()[name.replace("3", "2")].shape) for name in names})
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert [line for line in lines if "float" not in line] == [
        "missing in the checkpoint: 3.bias",
        "not wanted by anybody: 2.bias",
    ]


def test_casts_only_when_asked(foreign, tmp_path):
    def model():
        return {
            "a": torch.zeros(3, 4, dtype=torch.float16),
            "b": torch.zeros(5, dtype=torch.float16),
            "c": torch.zeros(4, dtype=torch.int64),
        }

    with pytest.raises(CheckpointError, match="Rename with `names`, cast with `dtype`"):
        load(tmp_path, model=model())
    halves = model()
    load(tmp_path, model=halves, dtype=torch.float16)
    assert all(torch.equal(value, foreign[name].to(value.dtype)) for name, value in halves.items())
    counted = {**model(), "c": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"'c' is torch.int64"):
        load(tmp_path, model=counted, dtype=torch.float32)


def test_a_checkpoint_saved_in_less_precision_fills_a_model_of_more(tmp_path):
    model, other = make_model(), make_model(1)
    save(tmp_path / "c", model=model, format=Format(dtype=torch.bfloat16))
    load(tmp_path / "c", model=other, dtype=torch.float64)
    assert torch.equal(other[0].weight, model[0].weight.bfloat16().double())


@pytest.mark.ranks(2)
def test_foreign_folders_go_to_shards(tmp_path):
    torch.manual_seed(0)
    rank = dist.get_rank()
    value = torch.randn(1500, 1001)  # 6 MB: two blocks, the edge within a row
    layout = {"w": rectangle((1500, 1001), 1, 500 * rank, 500 + 501 * rank, rank)}
    expected = value[:, 500 * rank : 500 + 501 * rank]
    if rank == 0:
        for name in ("one", "many", "bin"):
            (tmp_path / name).mkdir()
        b = torch.arange(7.0)
        safetensors.torch.save_file({"w": value, "b": b}, tmp_path / "one" / "model.safetensors", {"format": "pt"})
        safetensors.torch.save_file({"w": value}, tmp_path / "many" / "model-00001-of-00002.safetensors")
        safetensors.torch.save_file({"b": b}, tmp_path / "many" / "model-00002-of-00002.safetensors")
        files = {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        index = json.dumps({"metadata": {}, "weight_map": files})
        (tmp_path / "many" / "model.safetensors.index.json").write_text(index)
        torch.save({"w": value, "b": b}, tmp_path / "bin" / "pytorch_model.bin")
    dist.barrier()
    for name in ("one", "many", "bin"):
        for verify in ("auto", "full", "off"):
            model = {"w": torch.zeros_like(expected), "b": torch.zeros(7)}
            load(tmp_path / name, model=model, verify=verify, format=Format(layout=layout))
            assert torch.equal(model["w"], expected), name
            assert torch.equal(model["b"], torch.arange(7.0))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("verify", ["auto", "full"])
def test_corrupt_data_raises_on_all_ranks_and_names_tensor_file_and_block(verify, tmp_path):
    rank = dist.get_rank()
    value = torch.arange(4.0 * MIB4).view(2048, 2048)
    layout = {"w": rectangle((2048, 2048), 1, 1024 * rank, 1024 * rank + 1024, rank)}
    save(tmp_path / "c", model={"w": value[:, 1024 * rank :][:, :1024].contiguous()}, format=Format(layout=layout))
    if rank == 0:
        flip(tmp_path / "c" / "model.safetensors", -5)
    dist.barrier()
    model = {"w": torch.zeros(2048, 1024)}
    with pytest.raises(CorruptError) as caught:
        load(tmp_path / "c", model=model, verify=verify, format=Format(layout=layout))
    assert "block 3" in str(caught.value)
    assert "model.safetensors" in str(caught.value)
    assert "'w'" in str(caught.value) or verify == "full"
    assert ("now undefined" in str(caught.value)) == (verify == "auto")
    if verify == "full":
        assert model["w"].count_nonzero() == 0
    load(tmp_path / "c", model=model, verify="off", format=Format(layout=layout))


def test_there_is_no_such_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="there is no folder"):
        load(tmp_path / "none", model=make_model())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weights"):
        load(tmp_path, model=make_model())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match="has no optimizer state; pass no optimizer"):
        load(tmp_path, model=model, optimizer=optimizer)


@pytest.mark.ranks(2)
def test_what_the_caller_got_wrong_is_said_on_every_rank(tmp_path):
    save(tmp_path / "c", model={"w": torch.ones(3)})
    model = {"w": torch.zeros(3)}
    wrong = [
        ({"verify": "maybe"}, ValueError, "verify is 'maybe'; it can be 'auto', 'full', 'off'"),
        ({"format": 3}, TypeError, "format is 3; give a par_checkpoint.Format"),
        ({"transfer": 3}, TypeError, "transfer is 3; give a par_checkpoint.Transfer"),
        ({"tiers": ["a"]}, TypeError, r"tiers is \['a'\]; give a par_checkpoint.Tiers"),
        ({"format": Format(names={"w": 3})}, TypeError, "names are strings"),
        ({"format": Format(variant="a/b")}, ValueError, "variant 'a/b'"),
    ]
    for keywords, kind, words in wrong:
        with pytest.raises(kind, match=words):
            load(tmp_path / "c", model=model, **keywords)
        mine = keywords if dist.get_rank() == 1 else {}
        if "variant" not in words:
            with pytest.raises(kind, match=words):
                load(tmp_path / "c", model=model, **mine)
    assert model["w"].sum() == 0
    load(tmp_path / "c", model=model)
    assert model["w"].sum() == 3


@pytest.mark.ranks(2)
def test_a_bar_without_tqdm_is_refused_on_every_rank(monkeypatch, tmp_path):
    model = {"w": torch.ones(3)}
    save(tmp_path / "c", model=model)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        load(tmp_path / "c", model=model, transfer=Transfer(progress=dist.get_rank() == 0))
    load(tmp_path / "c", model=model)


@pytest.mark.ranks(2)
def test_saves_and_loads_talk_little(monkeypatch, tmp_path):
    counted = Counter()
    for name in ("total", "distinct_bytes", "broadcast", "to_first"):
        act = getattr(Ranks, name)
        noted = lambda self, value, name=name, act=act: counted.update([name]) or act(self, value)  # noqa: E731
        monkeypatch.setattr(Ranks, name, noted)
    rank, value = dist.get_rank(), torch.arange(30.0).view(6, 5)
    rows = {"w": value[3 * rank :][:3].contiguous()}, {"w": rectangle((6, 5), 0, 3 * rank, 3 * rank + 3, rank)}
    hosts = 1
    for name, model, layout in (("replicas", {"w": value}, None), ("rows", *rows)):
        for path, planning in ((tmp_path / name, 2), (tmp_path / f"{name} again", 0)):
            save(path, model=model, format=Format(layout=layout))
            # words, sight of the staging and the end of writing; staging and commit; what ranks hold, and once where
            told = {"total": 3, "broadcast": 2, "to_first": 1, "distinct_bytes": planning + hosts}
            assert counted == Counter(told), path
            hosts = 0
            counted.clear()
        for planning in (2, 0):
            load(tmp_path / name, model=model, format=Format(layout=layout))
            # options, a look, claims and the end; the version and the outline; what they hold
            told = {"total": 4, "broadcast": 2, "distinct_bytes": planning}
            parts = {"to_first": 1, "broadcast": 1} if layout else {}
            assert counted == Counter(told) + Counter(parts), name
            counted.clear()


@pytest.mark.ranks([storm(2), 4])
def test_no_rank_collects_an_object_of_every_other_one(monkeypatch, tmp_path):
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ("all_gather_object", "gather_object", "scatter_object_list"):
        monkeypatch.setattr(dist, name, None)
    read, told = [], []
    loads, gather = pickle.loads, private.all_gather_into
    monkeypatch.setattr("par_checkpoint.transfer.ranks.pickle.loads", lambda data: read.append(data) or loads(data))

    def noted(gloo, every, mine, timeout):
        told.append(mine.numel() * mine.element_size())
        gather(gloo, every, mine, timeout)

    monkeypatch.setattr("par_checkpoint.transfer.ranks.all_gather_into", noted)
    value = torch.arange(40.0).view(8, 5)
    rows = 8 // size
    layout = {"w": rectangle((8, 5), 0, rows * rank, rows * rank + rows, rank)}
    model = {"w": value[rows * rank :][:rows].contiguous()}
    save(tmp_path / "c", model=model, format=Format(layout=layout))
    load(tmp_path / "c", model=model, format=Format(layout=layout))
    assert torch.equal(model["w"], value[rows * rank :][:rows])
    assert len(read) == 6, (
        "of the first rank, or of all that say the same: staging, commit, host; version, outline, end"
    )
    assert set(told) == {24}, "digests and lengths: all else is told by few"


def test_holders_of_copies_are_told(tmp_path):
    save(tmp_path / "c", model=make_model())
    other, told = make_model(1), []
    registration = on_written(other.parameters(), lambda tensors: told.append(len(tensors)))
    load(tmp_path / "c", model=other)
    registration.remove()
    assert told == [4]


def test_gradients_and_hooks_stay(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    train(model, optimizer, range(1))
    model(torch.zeros(1, 6, dtype=torch.float64)).sum().backward()
    gradient = model[2].bias.grad
    version, parameter = model[2].bias._version, model[2].bias
    load(tmp_path / "c", model=model, optimizer=optimizer)
    assert model[2].bias is parameter
    assert model[2].bias.grad is gradient
    assert model[2].bias.requires_grad
    assert model[2].bias.is_leaf
    assert version <= model[2].bias._version
    assert torch.equal(model[2].bias, make_model()[2].bias)


@pytest.mark.cpu(reason="loads a tensor of the meta device to the host")
@pytest.mark.ranks(2)
def test_the_default_device_does_not_matter(tmp_path):
    run, other = Tensor2(), Tensor2(1)
    run.steps(range(2))
    for style in ("huggingface", "torch"):
        extra = [torch.ones(2)]
        with torch.device("meta"):  # as torch.set_default_device("cuda") would
            save(tmp_path / style, model=run.model, optimizer=run.optimizer, extra=extra, format=Format(style=style))
            report = load(tmp_path / style, model=other.model, optimizer=other.optimizer)
            slot = read_tensor(tmp_path / style, "0.weight.exp_avg")
            assert check(tmp_path / style) == []
        assert report.extra[0].tolist() == [1, 1]
        assert all(torch.equal(one, two) for one, two in zip(run.whole().values(), other.whole().values(), strict=True))
        assert torch.equal(slot, run.whole()["0.weight.exp_avg"])


def test_a_tensor_of_several_blocks_and_its_neighbours(tmp_path):
    torch.manual_seed(0)
    model = nn.ParameterDict({"small": torch.randn(3), "large": torch.randn(3 * MIB4 + 5), "next": torch.randn(2, 2)})
    save(tmp_path / "c", model=model)
    other = nn.ParameterDict({name: torch.zeros_like(value) for name, value in model.items()})
    load(tmp_path / "c", model=other, verify="full")
    assert all(torch.equal(other[name], value) for name, value in model.items())


def test_autograd_learns_that_weights_were_loaded(tmp_path):
    model = nn.Linear(3, 2)
    save(tmp_path / "c", model=model)
    loss = model(model(torch.ones(1, 3)).expand(1, 2)[:, :1].expand(1, 3)).sum()
    load(tmp_path / "c", model=model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@contextlib.contextmanager
def as_nobody():
    """Without the rights of root, whom no mode of a file stops."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_folder():
    """A folder that everybody may enter, unlike those of pytest."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.ranks(2)
def test_what_may_not_be_read_or_written_raises_on_every_rank(open_folder):
    model = {"w": torch.ones(3)}
    save(open_folder / "c", model=model)
    into = {"w": torch.zeros(3)}
    denied = pytest.raises(OSError, match="Permission denied")
    for file in ("par_checkpoint.json", "model.safetensors"):
        if dist.get_rank() == 0:
            (open_folder / "c" / file).chmod(0)
        dist.barrier()
        with as_nobody(), denied:
            load(open_folder / "c", model=into)
    assert not into["w"].any()
    if dist.get_rank() == 0:
        for path in (open_folder, open_folder / "c"):
            path.chmod(0o555)
        for file in (open_folder / "c").iterdir():
            file.chmod(0o644)
    dist.barrier()
    with as_nobody():
        for name in ("c", "d"):
            with denied:
                save(open_folder / name, model=into, overwrite=True)
        load(open_folder / "c", model=into)
    assert into["w"].all()
    assert [each.name for each in open_folder.iterdir()] == ["c"]


@pytest.mark.cpu(reason="loads a tensor of the meta device to the host")
@pytest.mark.ranks(2)
def test_padding_of_a_tensor_on_the_meta_device_becomes_zeros(tmp_path):
    rank, rows = dist.get_rank(), torch.arange(6.0).reshape(3, 2)
    save(tmp_path, model={"table.weight": rows} if rank == 0 else {}, format=Format(style="huggingface"))
    module = nn.Module()
    module.table = nn.Embedding(2, 2, device="meta")
    box = Box(start=(2 * rank, 0), size=(2 - rank, 2), offset=0, stride=(2, 1), copies=(rank,))
    set_sharding(module.table.weight, Sharding((3, 2), (box,)))
    torch.use_deterministic_algorithms(True)  # then memory that nobody has written holds NaN
    try:
        load(tmp_path, model=module)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = torch.cat([rows, torch.zeros(1, 2)])[2 * rank : 2 * rank + 2]
    assert torch.equal(module.table.weight, expected)
