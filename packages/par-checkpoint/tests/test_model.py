"""Tensors of a model as they lie in memory."""

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import load, save


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as quantised ones are."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(args[0].inner) if function is torch.ops.aten.detach.default else NotImplemented


def strange():
    """What is refused, by what is said of it."""
    numbers = torch.tensor([1 + 1j, 2 - 1j])
    return {
        "layout torch.sparse_coo": torch.eye(3).to_sparse(),
        "conjugated or negated lazily": numbers.conj(),
        "negated lazily": numbers.conj().imag,
        "a Wrapper, which keeps its data in other tensors": Wrapper(torch.ones(3)),
    }


@pytest.mark.ranks(2)
def test_what_does_not_lie_in_memory_is_refused_by_name_on_every_rank(tmp_path):
    rank = dist.get_rank()
    for words, tensor in strange().items():
        with pytest.raises(ValueError, match=f"'odd' .*{words}"):
            save(tmp_path / "c", model={"odd": tensor} if rank else {"even": torch.ones(2)})
    assert not list(tmp_path.iterdir())
    save(tmp_path / "c", model={"odd": torch.ones(3)})
    with pytest.raises(ValueError, match=r"'odd' .*other tensors"):
        load(tmp_path / "c", model={"odd": Wrapper(torch.ones(3)) if rank else torch.zeros(3)})


def test_slots_of_an_optimizer_are_looked_at_too(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([("p", parameter)], lr=0.1)
    optimizer.state[parameter]["moment"] = Wrapper(torch.ones(3))
    with pytest.raises(ValueError, match=r"'p\.moment' is a Wrapper"):
        save(tmp_path / "c", optimizer=optimizer)


def test_an_expanded_tensor_is_saved_and_not_filled(tmp_path):
    rows = torch.arange(4.0).expand(3, 4)
    save(tmp_path / "c", model={"rows": rows, "row": rows[:1]})
    other = {"rows": torch.zeros(4).expand(3, 4), "row": torch.zeros(4).expand(1, 4)}
    with pytest.raises(ValueError, match="'rows' is expanded"):
        load(tmp_path / "c", model=other)
    assert not other["row"].any()
    other["rows"] = other["rows"].contiguous()
    load(tmp_path / "c", model=other)
    assert torch.equal(other["rows"], rows)
