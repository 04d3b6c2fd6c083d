import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from par_groups import Box, Sharding, set_sharding
from par_testing import assert_equal_to_one_device

WHOLE = torch.arange(24.0).reshape(6, 4)


def columns(first, size, whole=WHOLE):
    """The shard of some columns, as a contiguous local tensor with its record."""
    local = whole[:, first : first + size].clone()
    rows = whole.shape[0]
    set_sharding(local, Sharding(tuple(whole.shape), (Box((0, first), (rows, size), 0, (size, 1), (0,)),)))
    return local


def test_equal_shard():
    assert_equal_to_one_device({"w": columns(2, 2)}, {"w": WHOLE, "more": WHOLE})


def test_several_boxes():
    local = torch.cat([WHOLE[0:1], WHOLE[4:6]])
    boxes = (Box((0, 0), (1, 4), 0, (4, 1), (0,)), Box((4, 0), (2, 4), 4, (4, 1), (0,)))
    set_sharding(local, Sharding((6, 4), boxes))
    assert_equal_to_one_device({"w": local}, {"w": WHOLE})
    local[2, 3] += 0.5
    with pytest.raises(AssertionError, match=r"w: box \[4:6, 0:4\] of \(6, 4\) .* at \[5, 3\]: 23.5 here, 23 on one"):
        assert_equal_to_one_device({"w": local}, {"w": WHOLE})


def test_difference_is_described():
    local = columns(2, 2)
    local[1, 0] += 0.25
    local[3, 1] -= 1.0
    with pytest.raises(AssertionError) as caught:
        assert_equal_to_one_device({"w": local}, {"w": WHOLE})
    assert str(caught.value) == (
        "w: box [0:6, 2:4] of (6, 4) differs from one device in 2 of 12 elements, at most by 1 at [3, 3]: "
        "14 here, 15 on one device (must be equal exactly)"
    )


@pytest.mark.parametrize(("change", "passes"), [(1e-3, True), (1e-1, False)])
def test_tolerance(change, passes):
    local = columns(0, 4)
    local[0, 1] += change
    arguments = {"rtol": 1e-2, "reason": "another order of summation"}
    if passes:
        assert_equal_to_one_device({"w": local}, {"w": WHOLE}, **arguments)
    else:
        with pytest.raises(AssertionError, match=r"rtol=0\.01, atol=0\.0: another order of summation"):
            assert_equal_to_one_device({"w": local}, {"w": WHOLE}, **arguments)


def test_not_a_number_is_never_equal():
    local = columns(0, 4)
    local[2, 2] = torch.nan
    with pytest.raises(AssertionError, match=r"at \[2, 2\]: nan here"):
        assert_equal_to_one_device({"w": local}, {"w": WHOLE}, atol=9.0, reason="a test")


def test_infinity_equals_itself():
    whole = torch.tensor([torch.inf, -torch.inf])
    assert_equal_to_one_device({"w": whole.clone()}, {"w": whole})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_dtypes(dtype):
    whole = torch.tensor([1, 0, 1]).to(dtype)
    assert_equal_to_one_device({"w": whole.clone()}, {"w": whole})
    with pytest.raises(AssertionError, match="at most by 1 at"):
        assert_equal_to_one_device({"w": torch.tensor([1, 1, 1]).to(dtype)}, {"w": whole})


def test_scalars_and_empty_tensors():
    tensors = {"a": torch.tensor(2.0), "b": torch.empty(0)}
    assert_equal_to_one_device(tensors, {name: tensor.clone() for name, tensor in tensors.items()})
    with pytest.raises(AssertionError, match=r"a: box \[\] of \(\) .* at \[\]: 2 here, 3 on one device"):
        assert_equal_to_one_device({"a": torch.tensor(2.0)}, {"a": torch.tensor(3.0)})


def test_modules_with_buffers():
    model, other = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    assert_equal_to_one_device(model, other)
    other(torch.arange(6.0).reshape(2, 3))
    with pytest.raises(AssertionError, match="running_mean"):
        assert_equal_to_one_device(model, other)


def test_gradients():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.load_state_dict(model.state_dict())
    other(torch.ones(2)).sum().backward()
    with pytest.raises(AssertionError, match="weight: there is a gradient on one device, but none here"):
        assert_equal_to_one_device(model, other, gradients=True)
    model(torch.ones(2)).sum().backward()
    assert_equal_to_one_device(model, other, gradients=True)
    model.bias.grad[1] = 7.0
    with pytest.raises(AssertionError, match=r"bias: box \[0:2\] .* at \[1\]: 7 here, 1 on one device"):
        assert_equal_to_one_device(model, other, gradients=True)


def test_shapes_and_dtypes_must_agree():
    with pytest.raises(AssertionError, match=r"w: a tensor of shape \(3,\), but on one device of shape \(4,\)"):
        assert_equal_to_one_device({"w": torch.ones(3)}, {"w": torch.ones(4)})
    with pytest.raises(AssertionError, match=r"w: torch.float64 here, torch.float32 on one device"):
        assert_equal_to_one_device({"w": torch.ones(3).double()}, {"w": torch.ones(3)})


def test_mistakes():
    tensors = {"w": torch.ones(3)}
    with pytest.raises(ValueError, match="without a reason"):
        assert_equal_to_one_device(tensors, tensors, rtol=1e-6)
    with pytest.raises(ValueError, match="not negative"):
        assert_equal_to_one_device(tensors, tensors, atol=-1.0, reason="none")
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_equal_to_one_device({}, tensors)
    with pytest.raises(ValueError, match=r"no tensor called \['v'\]; it has \['w'\]"):
        assert_equal_to_one_device({"v": torch.ones(3)}, tensors)


@pytest.mark.ranks(2)
def test_dtensor():
    mesh = init_device_mesh("cpu", (2,))
    shard = distribute_tensor(WHOLE, mesh, [Shard(0)])
    assert_equal_to_one_device({"w": shard}, {"w": WHOLE})
    shard.to_local()[2, 1] += 1
    row = 2 + 3 * dist.get_rank()
    with pytest.raises(AssertionError, match=rf"at \[{row}, 1\]"):
        assert_equal_to_one_device({"w": shard}, {"w": WHOLE})
