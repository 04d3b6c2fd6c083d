import pytest
import torch
import torch.distributed as dist

from par_groups import backend_of, sendable


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
