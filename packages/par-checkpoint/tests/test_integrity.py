"""One byte, one file or the end of a file is not what was written: it is told, where, mostly before any change."""

import errno
import os
import random
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import par_checkpoint as pc
from par_groups import Box, Sharding
from par_testing import storm

from .helpers import policies

BLOCK = 4 << 20
MANIFEST = "par_checkpoint.json"
SIDE = "par_checkpoint.safetensors"
INDEX = "model.safetensors.index.json"


def state(value=None):
    """A model of several files, of which one has several blocks, and an optimizer; empty without a value."""
    shapes = {"embed": (1100, 1000), "small": (7,), "last": (300, 500)}
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
    optimizer = torch.optim.SGD([model["small"], model["last"]], lr=0.1, momentum=0.9)
    if value is not None:
        torch.manual_seed(value)
        for parameter in model.values():
            parameter.data.normal_()
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
    return model, optimizer


def saved(path, **options):
    model, optimizer = state(1)
    extra = {"step": 3, "rng": torch.arange(100)}
    options = {"max_shard_size": "2MB", "config": {"a": 1}, **options}
    pc.save(path, model=model, optimizer=optimizer, extra=extra, **policies(**options))
    return model, optimizer


def error_of(path, **options):
    """What loading raises, and whether anything had changed by then."""
    model, optimizer = state()
    try:
        pc.load(path, model=model, optimizer=optimizer, **options)
    except pc.CheckpointError as error:
        unchanged = not any(parameter.any() for parameter in model.values()) and not optimizer.state
        return error, unchanged
    return None, False


def data_begin(file):
    """Where the data of a safetensors file begins."""
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def flip(file, at, bit=0):
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


def names(path):
    """All files that have checksums."""
    found = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
    return [each for each in found if each != "config.json"]


def region_of(path, name, at):
    """What kind of byte it is."""
    if not name.endswith(".safetensors") or name == SIDE:
        return "small"
    return "header" if at < data_begin(path / name) else "data"


def random_flips(path, count, seed):
    """File, byte and bit: as many in every file, half of those in tensors' files in the header."""
    chosen = random.Random(seed)
    files = names(path)
    for number in range(count):
        name = files[number % len(files)]
        size = (path / name).stat().st_size
        begin = data_begin(path / name) if name.endswith(".safetensors") else 0
        at = chosen.randrange(begin) if begin and number // len(files) % 2 else chosen.randrange(begin, size)
        yield name, at, chosen.randrange(8)


def check_flip(path, name, at, bit, **options):
    """A flip is found; in a tensor's data with its place, elsewhere before any change."""
    flip(path / name, at, bit)
    error, unchanged = error_of(path, **options)
    assert isinstance(error, pc.CorruptError), (name, at, bit)
    assert name in str(error) or name in (MANIFEST, SIDE), (name, at, bit)
    if region_of(path, name, at) == "data":
        number = (at - data_begin(path / name)) // BLOCK
        begin = data_begin(path / name) + number * BLOCK
        assert f"block {number} of '{path}/{name}' (from byte {begin})" in str(error)
        tensor = re.search(r"holds parts of (.*?)\.", str(error))
        assert tensor, str(error)
        undefined = "is now undefined" in str(error)
        assert undefined != (options.get("verify") == "full")
        assert undefined or unchanged
    else:
        assert unchanged, (name, at, bit)
    flip(path / name, at, bit)


def test_a_hundred_flips_are_all_found(tmp_path):
    path = tmp_path / "c"
    saved(path)
    assert len(names(path)) == 7
    seen = set()
    for name, at, bit in random_flips(path, 100, seed=0):
        check_flip(path, name, at, bit)
        seen.add((name, region_of(path, name, at)))
    assert len(seen) == 10
    assert error_of(path) == (None, False), "each flip was undone"


def test_with_full_verification_nothing_has_changed_either(tmp_path):
    path = tmp_path / "c"
    saved(path)
    for name, at, bit in random_flips(path, 28, seed=1):
        check_flip(path, name, at, bit, verify="full")


def test_a_flip_names_the_tensors_of_its_block(tmp_path):
    path = tmp_path / "c"
    saved(path, max_shard_size="1GB")
    file = path / "model.safetensors"
    begin = data_begin(file)
    for at, block, tensors in ((begin, 0, "'embed'"), (begin + BLOCK, 1, "'embed', 'last', 'small'")):
        flip(file, at)
        error, _ = error_of(path)
        assert re.search(rf"block {block} of .*model\.safetensors.* It holds parts of {tensors}\.", str(error))
        flip(file, at)


@pytest.mark.ranks(2)
def test_all_ranks_raise_the_same(tmp_path):
    path = tmp_path / "c"
    saved(path)
    rank = dist.get_rank()
    every = [None, None]
    for name, at, bit in list(random_flips(path, 10, seed=2)):
        if rank == 0:
            flip(path / name, at, bit)
        dist.barrier()
        error, unchanged = error_of(path)
        dist.all_gather_object(every, (type(error), str(error), unchanged))
        assert every[0][:2] == every[1][:2], (name, at, bit)
        assert isinstance(error, pc.CorruptError), (name, at, bit)
        assert unchanged or region_of(path, name, at) == "data"
        if rank == 0:
            flip(path / name, at, bit)
        dist.barrier()
    assert error_of(path)[0] is None


def test_every_file_cut_short_or_removed_is_found_before_any_change(tmp_path):
    path, ways = tmp_path / "c", ("auto", "full", "off")
    saved(path)
    for name in names(path):
        whole = (path / name).read_bytes()
        for size in {0, len(whole) // 2, len(whole) - 1}:
            (path / name).write_bytes(whole[:size])
            for verify in ways:
                error, unchanged = error_of(path, verify=verify)
                assert isinstance(error, pc.CorruptError), (name, size, verify)
                assert unchanged
            assert len(pc.verify(path)) == len(pc.verify(path, deep=False)) == 1
        (path / name).unlink()
        for verify in ways:
            error, unchanged = error_of(path, verify=verify)
            assert isinstance(error, pc.CheckpointError), (name, verify)
            assert name in str(error)
            assert unchanged
        assert len(pc.verify(path)) == 1
        (path / name).write_bytes(whole)
    assert [error_of(path, verify=verify)[0] for verify in ways] == [None] * 3


def test_more_bytes_than_were_written_are_found(tmp_path):
    path = tmp_path / "c"
    saved(path)
    for name in names(path):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole + b" ")
        assert isinstance(error_of(path)[0], pc.CorruptError), name
        (path / name).write_bytes(whole)


@pytest.mark.ranks(2)
def test_all_ranks_raise_the_same_for_files_cut_short_or_removed(tmp_path):
    path, every = tmp_path / "c", [None, None]
    saved(path)
    for name in (MANIFEST, SIDE, INDEX, "model-00002-of-00002.safetensors"):
        for size in (None, 100):
            whole = (path / name).read_bytes()
            dist.barrier()
            if dist.get_rank() == 0:
                (path / name).unlink()
                if size is not None:
                    (path / name).write_bytes(whole[:size])
            dist.barrier()
            error, unchanged = error_of(path)
            dist.all_gather_object(every, (type(error), str(error), unchanged))
            assert every[0] == every[1]
            assert unchanged
            if dist.get_rank() == 0:
                (path / name).write_bytes(whole)
            dist.barrier()
    assert error_of(path)[0] is None


def test_without_verification_data_is_not_compared_and_the_rest_is(tmp_path):
    path = tmp_path / "c"
    saved(path)
    for name in names(path):
        if re.match(r"(optimizer/optimizer|model)-", name):
            begin = data_begin(path / name)
            flip(path / name, begin + 5)
            assert error_of(path, verify="off")[0] is None, name
            flip(path / name, begin + 5)
            flip(path / name, begin - 20)
            error, unchanged = error_of(path, verify="off")
            assert isinstance(error, pc.CorruptError)
            assert unchanged
            flip(path / name, begin - 20)


def test_verify_lists_every_corrupt_block(tmp_path):
    path = tmp_path / "c"
    saved(path)
    assert pc.verify(path) == []
    embed, last = "model-00001-of-00002.safetensors", "optimizer/optimizer-00001-of-00001.safetensors"
    places = [(embed, data_begin(path / embed)), (embed, data_begin(path / embed) + BLOCK), (SIDE, 99)]
    places += [(last, data_begin(path / last))]
    for name, at in places:
        flip(path / name, at)
    wrong = pc.verify(path)
    assert len(wrong) == len(places)
    for name, _ in places:
        assert any(name in each for each in wrong)
    assert [each for each in wrong if "block 0 of" in each and embed in each]
    assert [each for each in wrong if "block 1 of" in each and embed in each]
    assert len(pc.verify(path, deep=False)) == 1, "of these it reads only the side file"
    flip(path / embed, 30)
    (path / last).unlink()
    wrong = pc.verify(path)
    assert len(wrong) == len(places) + 1, "nor does it stop at a header that makes no sense"
    assert [each for each in wrong if embed in each and "header" in each]
    assert [each for each in wrong if last in each and "missing" in each]


def test_verify_finds_a_flip_in_any_file(tmp_path):
    path = tmp_path / "c"
    saved(path)
    for name, at, bit in random_flips(path, 42, seed=3):
        flip(path / name, at, bit)
        wrong = pc.verify(path)
        assert len(wrong) == 1, (name, at, bit)
        assert name in wrong[0], (name, at, bit)
        flip(path / name, at, bit)
    assert pc.verify(path) == []


def test_flips_in_torch_style_are_found(tmp_path):
    path = tmp_path / "c"
    saved(path, style="torch")
    chosen = random.Random(4)
    files = [each for each in names(path) if each != "extra.pt"]
    assert {"model.pt", "optimizer.pt", MANIFEST} <= set(files)
    for number in range(30):
        name = files[number % len(files)]
        size = (path / name).stat().st_size
        at = chosen.randrange(size) if number % 2 else chosen.randrange(max(0, size - 2000), size)
        flip(path / name, at)
        error, _ = error_of(path)
        assert isinstance(error, pc.CheckpointError), (name, at)
        error, unchanged = error_of(path, verify="full")
        assert isinstance(error, pc.CheckpointError), (name, at)
        assert unchanged
        assert pc.verify(path) != []
        flip(path / name, at)
    assert error_of(path)[0] is None


def test_config_may_be_edited_by_hand(tmp_path):
    path = tmp_path / "c"
    saved(path)
    (path / "config.json").write_text('{"a": 2, "b": 3}')
    assert pc.verify(path) == pc.verify(path, deep=False) == []
    assert error_of(path)[0] is None, "its tensors are whole"
    assert error_of(path, verify="full")[0] is None, "people edit it"
    (path / "config.json").unlink()
    assert error_of(path)[0] is None, "whoever has the model needs no config"
    [wrong] = pc.verify(path, deep=False)
    assert "config.json is missing" in wrong


def rows(rank, size, value=None):
    """This rank's rows of two matrices, cut in the middle of blocks, and the layout that says so."""
    found, layout = {}, {}
    for name, shape in {"wide": (1003, 1300), "tall": (40000, 33)}.items():
        low, high = shape[0] * rank // size, shape[0] * (rank + 1) // size
        found[name] = torch.zeros(high - low, shape[1])
        if value is not None:
            found[name] += torch.arange(low, high)[:, None] + value
        box = Box((low, 0), (high - low, shape[1]), 0, (shape[1], 1), copies=(rank,))
        layout[name] = Sharding(shape, (box,))
    return found, layout


@pytest.mark.parametrize("verify", ["auto", "full"])
def test_a_disk_that_fails_in_the_middle_of_a_load_is_told_with_what_it_leaves_behind(tmp_path, monkeypatch, verify):
    saved(tmp_path / "c")
    real, read = os.preadv, []

    def fail_later(file, views, at):
        read.append(sum(map(len, views)))
        if sum(read) > BLOCK:  # headers and side files are less
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, views, at)

    model, optimizer = state()
    monkeypatch.setattr(os, "preadv", fail_later)
    with pytest.raises(OSError, match="Input/output error") as caught:
        pc.load(tmp_path / "c", model=model, optimizer=optimizer, verify=verify, transfer=pc.Transfer(threads=1))
    assert caught.value.errno == errno.EIO
    unchanged = not any(parameter.any() for parameter in model.values())
    assert unchanged == (verify == "full")
    assert ("is now undefined: load it again" in str(caught.value)) != unchanged


@pytest.mark.ranks([storm(2), 3])
def test_blocks_of_which_every_rank_reads_its_own_part_are_verified_together(tmp_path):
    rank, size = dist.get_rank(), dist.get_world_size()
    state, layout = rows(rank, size, 1)
    pc.save(tmp_path / "c", model=state, format=pc.Format(layout=layout))
    (file,) = (tmp_path / "c").glob("*.safetensors")
    whole, begin = file.read_bytes(), data_begin(file)
    loaded, _ = rows(rank, size)
    pc.load(tmp_path / "c", model=loaded, format=pc.Format(layout=layout))
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    chosen = random.Random(size)
    for at in [begin, len(whole) - 1, *(chosen.randrange(begin, len(whole)) for _ in range(20))]:
        if rank == 0:
            flip(file, at, bit=3)
        dist.barrier()
        number = (at - begin) // BLOCK
        with pytest.raises(pc.CorruptError, match=rf"block {number} of .* is corrupt: .* now undefined"):
            pc.load(tmp_path / "c", model=loaded, format=pc.Format(layout=layout))
        dist.barrier()
        if rank == 0:
            flip(file, at, bit=3)
        dist.barrier()
    pc.load(tmp_path / "c", model=loaded, format=pc.Format(layout=layout))
    assert all(torch.equal(loaded[name], state[name]) for name in state)
