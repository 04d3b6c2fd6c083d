"""What a test body finds on its ranks."""

import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from par_testing import fail_at

from ..helpers import Point

SIZES = (1, 2, 4)
IMPORTED_IN = os.getpid()


class Local:
    """Defined here, so that a rank can only unpickle it after importing this module."""

    def __init__(self, value):
        self.value = value


@pytest.mark.ranks(2)
def test_all_reduce():
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2, 2]


@pytest.mark.ranks(4)
def test_world_of_four():
    assert dist.get_world_size() == 4
    dist.barrier()


@pytest.mark.ranks(SIZES)
def test_list_of_sizes(sizes):
    assert dist.get_world_size() in sizes


@pytest.fixture
def sizes():
    return SIZES


def test_list_of_sizes_makes_tests(request):
    names = {item.name for item in request.session.items if item.path == request.path}
    if not any(name.startswith("test_list_of_sizes[") for name in names):
        pytest.skip("run by itself")
    assert {f"test_list_of_sizes[{size}ranks]" for size in SIZES} <= names


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize(("point", "local"), [(Point(1, 2), Local(3)), (Point(3, 4), Local(7))], ids=["a", "b"])
def test_arguments(point, local, tmp_path):
    assert local.value == point.x + point.y
    (tmp_path / str(dist.get_rank())).write_text("here")
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size()


class TestMethods:
    offset = 1

    @pytest.mark.ranks(2)
    def test_method(self):
        assert dist.get_rank() + self.offset in (1, 2)


@pytest.mark.ranks(2, init=False)
def test_environment_is_that_of_torchrun():
    assert not dist.is_initialized()
    assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"]
    dist.init_process_group("gloo")
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    assert tensor.item() == 3


@pytest.mark.ranks(2, init=False)
def test_nothing_is_left_of_an_earlier_store():
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", dist.TCPStore("127.0.0.1", _port())), **_place())
    dist.barrier()


def _port():
    return int(os.environ["MASTER_PORT"])


def _place():
    return {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


@pytest.mark.ranks(4, backend="fake")
def test_fake_backend():
    dist.all_reduce(torch.ones(2))
    assert dist.get_backend() == "fake"
    assert dist.get_world_size() == 4


@pytest.mark.ranks(3, dies=(1,))
def test_declared_death_is_no_failure():
    fail_at(rank=1, step=2, how="kill").check(dist.get_rank(), 2)
    if dist.get_rank() == 1:
        raise AssertionError("it should be dead")


@pytest.mark.ranks(2, dies=(0, 1))
def test_all_may_die():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


@pytest.mark.ranks(2)
def test_every_test_has_a_world_of_its_own():
    marker = sys.modules["torch"].__dict__.setdefault("_mark_of_an_earlier_test", os.getpid())
    assert marker == os.getpid()


@pytest.mark.ranks(2)
def test_the_module_of_the_test_is_imported_before_ranks_are_forked():
    assert os.getppid() == IMPORTED_IN


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("setting")
def test_ranks_see_the_environment_of_the_test():
    assert os.environ["SETTING_OF_A_FIXTURE"] == "1"


@pytest.fixture
def setting(monkeypatch):
    monkeypatch.setenv("SETTING_OF_A_FIXTURE", "1")


@pytest.mark.ranks(1)
def test_one_thread():
    assert torch.get_num_threads() == 1


@pytest.mark.ranks(2)
def test_subgroup_left_open():
    dist.new_group([0, 1])


@pytest.mark.ranks(2)
def test_rank_that_is_done_does_not_disturb_the_others():
    if dist.get_rank() == 1:
        dist.send(torch.ones(1), 0)
        return
    import time

    time.sleep(0.3)
    received = torch.zeros(1)
    dist.recv(received, 1)
    assert received.item() == 1
