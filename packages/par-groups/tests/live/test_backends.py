import pytest
import torch
import torch.distributed as dist

from par_groups import backend_of, check_collectives, sendable
from par_groups.live import backends as _backends
from par_testing import count_collectives, limited_backend

CPU = torch.device("cpu")


@pytest.mark.ranks(2, backend="gloo")
def test_gloo_serves_the_cpu():
    assert backend_of(None, "cpu") == backend_of(dist.group.WORLD, "cpu") == "gloo"
    assert backend_of(None, "xla") is None


def test_a_backend_of_accelerators_alone_has_nothing_for_the_cpu(monkeypatch):
    monkeypatch.setattr(
        dist, "get_backend_config", lambda group: "cuda:nccl" if group is None else "cuda:nccl,cpu:gloo"
    )
    assert (backend_of(None, "cuda"), backend_of(None, "cpu")) == ("nccl", None)
    assert (backend_of(object(), "cuda"), backend_of(object(), "cpu")) == ("nccl", "gloo")


def test_gloo_sends_from_the_cpu_and_nccl_from_where_the_tensor_is(monkeypatch):
    here, elsewhere = torch.zeros(2), torch.zeros(2, device="meta")  # stands for any other device
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: torch.ones(2))
    for backend, copied in (("gloo", True), ("nccl", False)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, name=backend: f"cpu:gloo,meta:{name}")
        assert sendable(here, None) is here
        assert (sendable(elsewhere, None) is elsewhere) is not copied


@pytest.mark.ranks(2, backend="gloo")
def test_what_a_backend_cannot_do_is_refused_on_every_rank_before_it_is_needed():
    group = dist.new_group([0, 1], backend=limited_backend("allreduce", "broadcast", "allgather"))
    check_collectives(group, CPU, ["all_reduce", "broadcast"], "this test")
    for collective in ("all_gather", "reduce_scatter", "all_to_all"):
        words = (
            rf"this test needs {collective}, which the backend 'limited' of ranks \[0, 1\] cannot do \(.*; pass a group"
        )
        with pytest.raises(ValueError, match=words):
            check_collectives(group, CPU, ["all_reduce", collective], "this test")
    with pytest.raises(
        ValueError, match=r"this test has tensors on 'xla:0', but the backend of ranks \[0, 1\] is .*limited"
    ):
        check_collectives(group, torch.device("xla", 0), ["all_reduce"], "this test")


EVERY = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.ranks(2, backend="gloo")
def test_what_gloo_can_do_is_known_and_would_be_found_out(monkeypatch):
    with count_collectives() as counted:
        check_collectives(dist.group.WORLD, CPU, EVERY, "this test")
    assert not counted.events
    monkeypatch.setattr(_backends, "_COMPLETE", ())
    check_collectives(dist.group.WORLD, CPU, EVERY, "this test")


@pytest.mark.ranks(2, backend="strict")
def test_a_group_in_python_with_all_methods_is_not_tried():
    with count_collectives() as counted:
        check_collectives(dist.group.WORLD, CPU, EVERY, "this test")
    assert not counted.events
