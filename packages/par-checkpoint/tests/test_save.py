import json
import random
import resource
import shutil

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import CheckpointError, Format, Transfer, inspect, load, read_tensor, save, verify
from par_checkpoint.transfer import write as writing
from par_groups import Box, Sharding

from .helpers import Pipeline2, Tensor2, make_model, policies, rectangle, solo

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EIGHTS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
WHOLES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def stored(path):
    """What safetensors itself finds in the model's files."""
    return {
        k: v for file in sorted(path.glob("model*.safetensors")) for k, v in safetensors.torch.load_file(file).items()
    }


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def every_dtype():
    """A tensor of each, of any bits, NaN among them; 0-dim and empty ones, too."""
    torch.manual_seed(0)
    model = {}
    known = set(safetensors.torch._TYPES.values())  # it is what reads them here; its old versions have fewer
    for dtype in (each for each in [*FLOATS, *EIGHTS, *WHOLES, torch.complex64] if each in known):
        name = str(dtype).partition(".")[2]
        model[name] = torch.randint(0, 256, (3, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)
        model[f"{name}.scalar"] = model[name][1, 2].clone()
        model[f"{name}.empty"] = torch.empty(2, 0, 3, dtype=dtype)
    model["flags"] = torch.tensor([True, False, True])
    return model


def test_all_dtypes_scalars_and_empty_tensors(tmp_path):
    model = every_dtype()
    save(tmp_path / "c", model=model)
    found = stored(tmp_path / "c")
    zeros = {name: torch.zeros_like(value) for name, value in model.items()}
    load(tmp_path / "c", model=zeros)
    for name, value in model.items():
        for got in (found[name], zeros[name]):
            assert (got.dtype, got.shape) == (value.dtype, value.shape), name
            assert torch.equal(bits(got), bits(value)), name


@pytest.mark.parametrize("numel", [3, 1 << 21])  # of one block, and of several
def test_data_is_aligned_as_memory_is(numel, tmp_path):
    """A copy between unlike alignments is a quarter slower."""
    save(tmp_path / "c", model={"an odd name": torch.ones(numel)})
    header = int.from_bytes((tmp_path / "c/model.safetensors").read_bytes()[:8], "little")
    assert (8 + header) % 64 == 0


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(2)
def test_all_dtypes_cut_by_columns(tmp_path):
    model, layout = {}, {}
    for name, value in every_dtype().items():
        model[name] = value
        if value.dim() == 2:
            begin, end = ((0, 2), (2, 5))[dist.get_rank()]
            layout[name] = rectangle((3, 5), 1, begin, end, dist.get_rank())
            model[name] = value[:, begin:end].contiguous()
    save(tmp_path / "c", model=model, format=Format(layout=layout))
    found = stored(tmp_path / "c")
    assert all(torch.equal(bits(found[name]), bits(value)) for name, value in every_dtype().items())
    zeros = {name: torch.zeros_like(value) for name, value in model.items()}
    load(tmp_path / "c", model=zeros, format=Format(layout=layout))
    assert all(torch.equal(bits(zeros[name]), bits(value)) for name, value in model.items())


def test_complex128_is_refused_by_name_before_any_file_exists(tmp_path):
    with pytest.raises(ValueError, match=r"'phase' is torch.complex128, which safetensors files cannot hold"):
        save(tmp_path / "c", model={"fine": torch.zeros(2), "phase": torch.zeros(2, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("async_", [False, True])
def test_tensors_that_do_not_lie_in_a_row(async_, tmp_path):
    torch.manual_seed(0)
    base = torch.randn(7, 5)
    model = nn.ParameterDict({"turned": base.t(), "steps": base[::2, 1:3], "spread": base[:1].expand(4, 5)})
    save(tmp_path / "c", model=model, async_=async_).wait()
    found = stored(tmp_path / "c")
    assert all(torch.equal(found[name], value) for name, value in model.items())
    other = nn.ParameterDict(
        {"turned": torch.zeros(7, 5).t(), "steps": torch.zeros(7, 9)[::2, 3:5], "spread": torch.zeros(4, 5)}
    )
    before = dict(other.items())
    load(tmp_path / "c", model=other)
    assert all(torch.equal(other[name], value) for name, value in model.items())
    assert all(other[name] is value for name, value in before.items())


def test_floating_point_is_cast_on_the_way(tmp_path):
    model = {"w": torch.randn(300, 7), "n": torch.arange(3), "e": torch.empty(0)}
    save(tmp_path / "c", model=model, format=Format(dtype=torch.bfloat16))
    found = stored(tmp_path / "c")
    assert {name: value.dtype for name, value in found.items()} == {
        "w": torch.bfloat16,
        "n": torch.int64,
        "e": torch.bfloat16,
    }
    assert torch.equal(found["w"], model["w"].bfloat16())
    assert model["w"].dtype == torch.float32


def test_small_files_are_named_and_indexed_like_those_of_transformers(tmp_path):
    model = {f"layers.{i}.w": torch.full((10, 10), float(i)) for i in range(5)}
    model["big"] = torch.ones(300)
    model["last"] = torch.ones(3)
    optimizer_of = {name: nn.Parameter(value) for name, value in model.items()}
    save(tmp_path / "c", model=optimizer_of, format=Format(max_shard_size="1KB", config={"model_type": "none"}))
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    files = [path.name for path in sorted((tmp_path / "c").glob("*.safetensors"))]
    assert files == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert index["metadata"] == {"total_parameters": 803, "total_size": 803 * 4}
    expected = [1, 1, 2, 2, 4, 3, 4]  # two a file; the large one has its own, before the file that is being filled
    assert index["weight_map"] == {
        name: f"model-{number:05d}-of-00004.safetensors" for name, number in zip(model, expected, strict=True)
    }
    assert all(torch.equal(value, model[name]) for name, value in stored(tmp_path / "c").items())
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == {"model_type": "none"}
    with safetensors.safe_open(tmp_path / "c" / files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    save(tmp_path / "d", model=model)
    assert not (tmp_path / "d" / "model.safetensors.index.json").exists()
    assert (tmp_path / "d" / "model.safetensors").exists()


def test_names_are_renamed_in_files_and_found_again(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ways = [
        {"0.weight": "first.weight", "0.bias": "first.bias", "elsewhere": "x"},
        [(r"^0\.", "first."), (r"nothing", "x")],
        lambda name: name.replace("0.", "first."),
    ]
    for number, names in enumerate(ways):
        path = tmp_path / f"{number}"
        save(path, model=model, optimizer=optimizer, format=Format(names=names))
        assert sorted(stored(path)) == ["2.bias", "2.weight", "first.bias", "first.weight"]
        slots = safetensors.torch.load_file(path / "optimizer" / "optimizer-00001-of-00001.safetensors")
        assert "first.weight.momentum_buffer" in slots
        other = make_model(1)
        again = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        load(path, model=other, optimizer=again, format=Format(names=names))
        assert torch.equal(other[0].weight, model[0].weight)
        assert torch.equal(
            again.state[other[0].bias]["momentum_buffer"], optimizer.state[model[0].bias]["momentum_buffer"]
        )


@pytest.mark.ranks(2)
def test_a_renaming_of_all_stages_is_given_to_each(tmp_path):
    run = Pipeline2()
    names = {"0.weight": "first.weight", "0.bias": "first.bias", "2.weight": "second.weight", "2.bias": "second.bias"}
    save(tmp_path / "c", model=run.model, format=Format(names=names))
    assert sorted(stored(tmp_path / "c")) == sorted(names.values())
    other = Pipeline2(seed=1)
    load(tmp_path / "c", model=other.model, format=Format(names=names))
    assert all(torch.equal(value, run.model[name]) for name, value in other.model.items())


WRONG = [
    ({"format": 3}, TypeError, "format is 3; give a par_checkpoint.Format"),
    ({"transfer": 3}, TypeError, "transfer is 3; give a par_checkpoint.Transfer"),
    ({"step": 1.5}, TypeError, "step=1.5: a float is no whole number"),
    ({"layout": {"x": Sharding((3,), ())}}, ValueError, "layout names 'x', but the model has no such tensor"),
    ({"layout": {"w": Sharding((9,), (Box((0,), (4,), 0, (1,), (0,)),))}}, ValueError, "boxes that leave the local"),
    ({"names": 3}, TypeError, "names is 3; give a dict"),
    ({"extra": object()}, TypeError, "extra"),
    ({"tiers": ["a"]}, TypeError, r"tiers is \['a'\]; give a par_checkpoint.Tiers"),
]


@pytest.mark.ranks(2)
def test_a_layout_may_name_tensors_of_other_ranks(tmp_path):
    rank = dist.get_rank()
    layout = {f"w{r}": Sharding((3,), (Box((0,), (3,), 0, (1,), (r,)),)) for r in range(2)}
    save(tmp_path / "c", model={f"w{rank}": torch.full((3,), rank + 1.0)}, format=Format(layout=layout))
    into = {f"w{rank}": torch.zeros(3)}
    load(tmp_path / "c", model=into, format=Format(layout=layout))
    assert into[f"w{rank}"].tolist() == [rank + 1.0] * 3
    assert stored(tmp_path / "c").keys() == {"w0", "w1"}


@pytest.mark.ranks(2)
def test_what_the_caller_got_wrong_is_said_on_every_rank_and_nothing_is_written(tmp_path):
    for options, kind, words in WRONG:
        keywords = options if "tiers" in options else policies(**options)
        with pytest.raises(kind, match=words):
            save(tmp_path / "c", model={"w": torch.zeros(3)}, **keywords)
        mine = keywords if dist.get_rank() == 1 else {}
        with pytest.raises(kind, match=words if dist.get_rank() or "layout names" in words else f"rank 1: .*{words}"):
            save(tmp_path / "c", model={"w": torch.zeros(3)}, **mine)
        dist.barrier()
        assert list(tmp_path.iterdir()) == [], keywords
    save(tmp_path / "c", model={"w": torch.zeros(3)})
    dist.barrier()
    with pytest.raises(FileExistsError, match="c"):
        save(tmp_path / "c", model={"w": torch.ones(3)})
    assert stored(tmp_path / "c")["w"].sum() == 0
    save(tmp_path / "c", model={"w": torch.ones(3)}, overwrite=True)
    dist.barrier()
    assert stored(tmp_path / "c")["w"].sum() == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(4)
def test_only_members_of_a_group_save_and_load(tmp_path):
    half = dist.new_group([1, 2])
    model = {"w": torch.arange(6.0)}
    if dist.get_rank() in (1, 2):
        save(tmp_path / "c", model=model, group=half)
        load(tmp_path / "c", model={"w": torch.zeros(6)}, group=half)
    else:
        for act in (save, load):
            with pytest.raises(ValueError, match=f"rank {dist.get_rank()} is not in the group; only its members"):
                act(tmp_path / "d", model=model, group=half)
    for act in (save, load):
        with pytest.raises(TypeError, match=r"group is 3; give a torch.distributed.ProcessGroup"):
            act(tmp_path / "d", model=model, group=3)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    dist.barrier()
    save(tmp_path / f"{dist.get_rank()}", model=model, group=solo())
    assert torch.equal(stored(tmp_path / f"{dist.get_rank()}")["w"], model["w"])


@pytest.mark.ranks(2)
def test_ranks_that_disagree_are_told_so(tmp_path):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    cases = [
        (
            {"model": {"w": torch.zeros(3 + rank)}},
            r"'model:w' is torch.float32 \(3,\) on rank 0, but torch.float32 \(4,\)",
        ),
        ({"model": {"w": torch.zeros(3, dtype=FLOATS[rank])}}, "but torch.float32"),
        ({"model": nn.Linear(3, 3)}, "'weight' and 1 more differ between ranks 0 and 1.*layout="),
    ]
    for keywords, words in cases:
        with pytest.raises(ValueError, match=words):
            save(tmp_path / "c", **keywords)
        dist.barrier()
        assert list(tmp_path.iterdir()) == []


def test_extra_comes_back_nested_and_typed(tmp_path):
    extra = {
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        "data": [{"epoch": 3, (1, 2): {4, 5}}, None, float("inf"), True],
        "scaler": {"scale": torch.tensor(65536.0)},
    }
    save(tmp_path / "c", extra=extra, step=12)
    report = load(tmp_path / "c")
    found = report.extra
    assert report.step == 12
    assert found["data"] == extra["data"]
    assert torch.equal(found["rng"]["torch"], extra["rng"]["torch"])
    expected = torch.rand(3)
    torch.set_rng_state(found["rng"]["torch"])
    assert torch.equal(torch.rand(3), expected)
    drawn = random.random()
    random.setstate(found["rng"]["python"])
    assert random.random() == drawn
    assert found["scaler"]["scale"] == 65536


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(4)
def test_a_tensor_larger_than_the_budget_goes_round_by_round(tmp_path):
    rank, width = dist.get_rank(), 1024
    torch.manual_seed(rank)
    part = torch.randn(2560, width)
    layout = {"w": rectangle((2560, 4 * width), 1, width * rank, width * (rank + 1), rank)}
    rounds, run = [], writing.PieceExchange.run
    writing.PieceExchange.run = lambda *args, **keywords: rounds.append(1) or run(*args, **keywords)
    save(tmp_path / "c", model={"w": part}, format=Format(layout=layout), transfer=Transfer(budget="16MB"))
    writing.PieceExchange.run = run
    assert len(rounds) == 3  # 40 MiB are 10 blocks, 3 for some ranks, and a round takes one from each
    other = {"w": torch.zeros_like(part)}
    load(tmp_path / "c", model=other, format=Format(layout=layout), transfer=Transfer(budget="16MB"))
    assert torch.equal(other["w"], part)
    if rank == 0:
        assert verify(tmp_path / "c") == []
        assert torch.equal(stored(tmp_path / "c")["w"][:, :width], part)


@pytest.mark.ranks(2)
def test_one_rank_may_own_each_file(tmp_path):
    run = Tensor2()
    run.steps(range(1))
    for writer in ("owner", "pwrite"):
        save(
            tmp_path / writer,
            model=run.model,
            optimizer=run.optimizer,
            format=Format(max_shard_size=600),
            transfer=Transfer(writer=writer),
        )
    dist.barrier()
    files = sorted(path.relative_to(tmp_path / "owner") for path in (tmp_path / "owner").rglob("*") if path.is_file())
    assert len(files) > 6
    for file in files:
        if file.name != "par_checkpoint.json":
            assert (tmp_path / "owner" / file).read_bytes() == (tmp_path / "pwrite" / file).read_bytes()


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "c", model={"w": torch.zeros(3)})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "crc32c", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "c", model={"w": torch.ones(3)}, overwrite=True)
    monkeypatch.undo()
    assert stored(tmp_path / "c")["w"].sum() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_nothing_at_all_is_a_checkpoint(tmp_path):
    save(tmp_path / "c")
    assert verify(tmp_path / "c") == []
    with pytest.raises(CheckpointError):
        load(tmp_path / "c", model=make_model())


@pytest.mark.storm
def test_a_tensor_of_more_than_two_gib(tmp_path):
    rows, width = 2100, 1_023_001  # the rows do not lie as those 2^31 bytes before
    row = torch.randint(-128, 128, (width,), dtype=torch.int8)
    save(tmp_path / "c", model={"w": row.expand(rows, width)}, format=Format(max_shard_size="1GB"))
    assert (tmp_path / "c/model.safetensors").stat().st_size > 1 << 31
    assert verify(tmp_path / "c") == []
    end = Box((rows - 2, 5), (2, width - 5), 0, (width - 5, 1), (0,))
    assert torch.equal(read_tensor(tmp_path / "c", "w", end), row[5:].expand(2, -1))
    part = {"w": torch.zeros(2, width - 5, dtype=torch.int8)}
    load(tmp_path / "c", model=part, format=Format(layout={"w": Sharding((rows, width), (end,))}))
    assert torch.equal(part["w"], row[5:].expand(2, -1))
    shutil.rmtree(tmp_path / "c")  # pytest would keep it


def test_more_files_than_a_process_may_have_open_are_saved_and_loaded(tmp_path):
    state = {str(number): torch.full((3,), float(number)) for number in range(300)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        save(tmp_path / "c", model=state, format=Format(max_shard_size=12))
        loaded = {name: torch.zeros(3) for name in state}
        load(tmp_path / "c", model=loaded)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 300
    assert all(torch.equal(loaded[name], state[name]) for name in state)


class Noted:
    """A scheduler of no kind that torch knows."""

    def state_dict(self):
        return {"rank": dist.get_rank()}


@pytest.mark.ranks(2)
def test_what_a_scheduler_says_must_be_the_same_on_all_ranks(tmp_path):
    with pytest.raises(ValueError, match="scheduler differs between ranks"):
        save(tmp_path / "c", scheduler=Noted())


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(3)
@pytest.mark.parametrize("style", ["huggingface", "torch"])
def test_extra_that_differs_between_ranks_is_kept_for_each(tmp_path, style):
    rank = dist.get_rank()
    given = [
        {"step": 7, "rng": torch.arange(5) + each, "seen": (each, {each: "x"}), "$ranks": [1]} for each in range(3)
    ]
    given[2] = None
    model = {"w": torch.ones(5), "extra": torch.zeros(3)}  # a name as a tensor of extra would have
    save(tmp_path / "c", model=model, extra=given[rank], format=Format(style=style))
    assert verify(tmp_path / "c") == []

    def same(found, expected):
        if expected is None:
            return found is None
        rest = {key: value for key, value in found.items() if key != "rng"}
        return torch.equal(found["rng"], expected["rng"]) and rest == {k: v for k, v in expected.items() if k != "rng"}

    report = load(tmp_path / "c", model=model)
    assert same(report.extra, given[rank])
    assert all(same(*pair) for pair in zip(report.extra_of_ranks, given, strict=True))
    assert all(same(*pair) for pair in zip(inspect(tmp_path / "c").extra, given, strict=True))
    groups = [dist.new_group([each]) for each in range(3)]
    with pytest.warns(UserWarning, match=r"extra differed between the 3 ranks .* and 1 load it: .* rank 0 here"):
        report = load(tmp_path / "c", model=model, group=groups[rank])
    assert same(report.extra, given[0])
    save(tmp_path / "d", model=model, extra=given[0], format=Format(style=style))
    report = load(tmp_path / "d", model=model)
    assert same(report.extra, given[0])
    assert report.extra_of_ranks is None
