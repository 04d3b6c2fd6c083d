import pytest
import torch.distributed as dist

from par_groups import backend_of


@pytest.mark.ranks(2)
def test_gloo_serves_the_cpu():
    assert backend_of(None, "cpu") == backend_of(dist.group.WORLD, "cpu") == "gloo"
    assert backend_of(None, "xla") is None


def test_a_backend_of_accelerators_alone_has_nothing_for_the_cpu(monkeypatch):
    monkeypatch.setattr(
        dist, "get_backend_config", lambda group: "cuda:nccl" if group is None else "cuda:nccl,cpu:gloo"
    )
    assert (backend_of(None, "cuda"), backend_of(None, "cpu")) == ("nccl", None)
    assert (backend_of(object(), "cuda"), backend_of(object(), "cpu")) == ("nccl", "gloo")
