"""Every rule of the strict device: a program that breaks it is named, and its mended twin is not."""

import ctypes
import gc
import os
import threading
import time

import pytest
import torch

from par_testing import HostAccessError, HostWaitError, RaceError, pageable_seen, step, waits_seen
from par_testing.accelerator.state import state

SIZE = 1024


def stream():
    return torch.get_device_module("strict").Stream()


def ones(size=SIZE):
    return torch.ones(size, device="strict")


def current():
    return torch.accelerator.current_stream()


def on(side):
    return torch.get_device_module("strict").stream(side)


@pytest.mark.accelerator
def test_read_before_copy_in_has_ended_raises():
    into, host, x = stream(), torch.randn(SIZE, pin_memory=True), torch.empty(SIZE, device="strict")
    into.wait_stream(current())
    with on(into):
        x.copy_(host, non_blocking=True)
    done = into.record_event()
    with pytest.raises(
        RaceError, match=r"mul on stream 0 reads Float\[1024\] at test_rules.py.*may still write"
    ) as raised:
        x * 2
    assert "copy to the device on stream 1, issued at test_rules.py" in str(raised.value)
    current().wait_event(done)
    assert torch.equal((x * 2).cpu(), host * 2)


def use_on(side):
    x = ones()
    side.wait_stream(current())
    with on(side):
        torch.get_device_module("strict")._sleep(10**9)  # longer than the host takes to launch what comes
        y = x * 2
    return x, y


@pytest.mark.accelerator
def test_memory_reused_while_a_stream_reads_raises():
    x, _ = use_on(stream())
    del x
    with pytest.raises(
        RaceError, match=r"ones|fill_ on stream 0 writes .* in memory taken at .* had been taken at .*freed at"
    ):
        ones()


@pytest.mark.accelerator
@pytest.mark.parametrize("remedy", ["record_stream", "event", "keep"])
def test_memory_reused_after_a_remedy_is_silent(remedy):
    side = stream()
    x, y = use_on(side)
    kept = x if remedy == "keep" else None
    if remedy == "record_stream":
        x.record_stream(side)
    if remedy == "event":
        current().wait_event(side.record_event())
    address = x.data_ptr()
    del x
    z = ones()
    assert (z.data_ptr() == address) == (remedy == "event")
    current().wait_stream(side)
    assert (y + z).sum().item() == 3 * SIZE
    del kept


def touched(how, tensor):
    """Reads or writes a buffer in one of the ways that a program can; the error comes behind the call."""
    if how == "torch":
        tensor.sum()
    elif how == "write":
        tensor.add_(1)
    elif how == "numpy":
        tensor.numpy()[5]
    else:
        ctypes.string_at(tensor.data_ptr(), 4)
    for _ in range(10):  # the interpreter raises at one of its next instructions
        pass


@pytest.mark.accelerator
@pytest.mark.parametrize("how", ["torch", "write", "numpy", "ctypes"])
def test_host_that_touches_a_copy_out_raises(how):
    x, host = ones(), torch.empty(SIZE, pin_memory=True)
    host.copy_(x, non_blocking=True)
    done = current().record_event()
    with pytest.raises(
        HostAccessError, match=r"copy to the host on stream 0, issued at test_rules.py:\d+.*is under way"
    ):
        touched(how, host)
    done.synchronize()
    touched(how, host)
    assert host[SIZE - 1] == 1 + 2 * (how == "write")


@pytest.mark.accelerator
def test_host_that_writes_a_copy_in_raises():
    host = torch.ones(SIZE, pin_memory=True)
    x = host.to("strict", non_blocking=True)
    assert host.sum() == SIZE  # it may be read meanwhile
    with pytest.raises(HostAccessError, match="the host wrote pinned memory while copy to the device"):
        touched("write", host)
    current().synchronize()
    assert x.sum().item() == SIZE


@pytest.mark.accelerator
def test_system_call_on_a_copy_out_fails(tmp_path):
    x, host = ones(), torch.empty(SIZE, pin_memory=True)
    view = host.numpy().data
    host.copy_(x, non_blocking=True)
    with (tmp_path / "out").open("wb", buffering=0) as file, pytest.raises(OSError, match="Bad address"):
        os.write(file.fileno(), view)
    current().synchronize()
    with (tmp_path / "out").open("wb", buffering=0) as file:
        assert os.write(file.fileno(), view) == 4 * SIZE


@pytest.mark.accelerator
def test_non_blocking_copy_of_pageable_memory_is_counted():
    torch.ones(SIZE).to("strict", non_blocking=True)
    ((where, count),) = pageable_seen().items()
    assert where.startswith("test_rules.py:")
    assert count == 1
    assert waits_seen() == {("a copy to the device of pageable memory", where): 1}
    torch.ones(SIZE, pin_memory=True).to("strict", non_blocking=True)
    assert not pageable_seen()
    assert not waits_seen()


WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 0],
    "unique": torch.unique,
    "cpu": lambda x: x.cpu(),
    "pageable": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "blocking": lambda x: torch.ones(4, pin_memory=True).to(x.device),
}


@pytest.mark.accelerator(waits="error")
@pytest.mark.parametrize("what", WAITS)
def test_wait_of_the_host_raises_where_refused(what):
    with pytest.raises(HostWaitError, match=r"test_rules.py:\d+.*the host would wait for the device there"):
        WAITS[what](ones(4))


@pytest.mark.accelerator
@pytest.mark.parametrize("what", WAITS)
def test_wait_of_the_host_in_a_step_raises(what):
    x = ones(4)
    WAITS[what](x)
    with step(), pytest.raises(HostWaitError, match=r"in a step, at test_rules.py"):
        WAITS[what](x)


@pytest.mark.accelerator
def test_wait_in_backward_in_a_step_raises():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.sum().item()

    x = ones(4).requires_grad_()
    y = Reads.apply(x).sum()
    with step(), pytest.raises(HostWaitError, match=r"item\(\) or bool\(\) in a step, at test_rules.py:backward"):
        y.backward()


@pytest.mark.accelerator(limit="1MiB")
def test_more_memory_than_the_limit_raises():
    kept = [torch.empty(1 << 18, dtype=torch.uint8, device="strict") for _ in range(4)]
    with pytest.raises(
        torch.OutOfMemoryError, match=r"512 bytes|1 bytes were asked for at test_rules.py.*limit is 1048576"
    ):
        torch.empty(1, dtype=torch.uint8, device="strict")
    assert torch.accelerator.memory_allocated() == torch.accelerator.max_memory_allocated() == 1 << 20
    del kept
    # One block of another size fits once the cached segments are released, which the host waits for.
    torch.empty(1 << 20, dtype=torch.uint8, device="strict")
    assert torch.accelerator.memory_stats()["num_alloc_retries"] == 2


@pytest.mark.accelerator
def test_peak_of_a_linear_layer_is_the_formula():
    layer = torch.nn.Linear(64, 32, device="strict")
    x = torch.ones(16, 64, device="strict")
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    layer(x).sum().backward()
    weight, bias, rows, total = 64 * 32 * 4, 512, 16 * 32 * 4, 512
    # The output dies with `sum`; backward of `sum` expands without memory, the product needs it contiguous.
    assert torch.accelerator.memory_allocated() - before == weight + bias
    assert torch.accelerator.max_memory_allocated() - before <= weight + bias + 2 * rows + 2 * total


@pytest.mark.accelerator
def test_fresh_memory_is_not_a_number():
    assert torch.empty(8, device="strict").isnan().all().item()


@pytest.mark.accelerator
def test_device_memory_read_by_its_address_raises():
    x = ones()
    with pytest.raises(HostAccessError, match=r"the host read memory of the strict device at 0x\w+; copy the tensor"):
        touched("ctypes", x)


@pytest.mark.accelerator
@pytest.mark.parametrize("first", ["read", "write"])
def test_write_beside_another_stream_raises(first):
    side, x = stream(), ones()
    side.wait_stream(current())
    with on(side):
        y = x.sum() if first == "read" else x.mul_(3)
    with pytest.raises(RaceError, match=rf"add_ on stream 0 writes .*may still {first}"):
        x.add_(1)
    current().wait_stream(side)
    x.add_(1)
    assert y.numel()


@pytest.mark.accelerator
def test_two_streams_that_read_are_silent():
    side, x = stream(), ones()
    side.wait_stream(current())
    with on(side):
        y = x * 2
    z = x * 3
    current().wait_stream(side)
    assert (y + z).sum().item() == 5 * SIZE


@pytest.mark.accelerator
def test_column_blocks_on_two_streams_are_silent():
    side, x = stream(), ones(64).view(8, 8)
    left, right = x[:, :4], x[:, 4:]
    side.wait_stream(current())
    with on(side):
        left.add_(1)
    right.add_(2)


@pytest.mark.accelerator
@pytest.mark.parametrize("part", [(slice(2, 3), slice(None)), (slice(None), slice(3, 5))], ids=["row", "columns"])
def test_part_that_meets_a_column_block_raises(part):
    side, x = stream(), ones(64).view(8, 8)
    side.wait_stream(current())
    with on(side):
        x[:, :4].add_(1)
    with pytest.raises(RaceError):
        x[part].add_(1)


@pytest.mark.accelerator
def test_backward_on_another_stream_than_forward_is_silent():
    side, layer, x = stream(), torch.nn.Linear(8, 8, device="strict"), torch.ones(4, 8, device="strict")
    side.wait_stream(current())
    with on(side):
        loss = layer(x).square().mean()
    loss.backward()
    assert (layer.weight.grad + 0).isfinite().all().item()


@pytest.mark.accelerator
def test_gradient_read_without_a_wait_raises():
    side, layer, x = stream(), torch.nn.Linear(8, 8, device="strict"), torch.ones(4, 8, device="strict")
    side.wait_stream(current())
    with on(side):
        layer(x).square().mean().backward()
    with pytest.raises(RaceError, match="on stream 0 reads"):
        layer.weight.grad + 0


@pytest.mark.accelerator
def test_tensors_of_host_and_device_do_not_mix():
    with pytest.raises(RuntimeError, match=r"add got a tensor on the host, \[4\], together with tensors on the device"):
        ones(4) + torch.ones(4)
    assert (ones(4) + torch.tensor(1.0)).sum().item() == 8  # a number of the host travels with the launch


@pytest.mark.accelerator
def test_garbage_collected_in_a_call_stops_no_other_thread():
    x, finished = ones(), threading.Barrier(3)

    def collected(*_):  # as a finalizer in Python, which lets another thread take the interpreter's lock
        time.sleep(1e-4)

    def call():
        opened, kept = state.native.open("call"), []
        for number in range(1000):
            gc.set_threshold(1 + number % 7)  # so that each allocation of a call starts a collection at some time
            kept.append((state.native.use(opened, x, False), [[] for _ in range(number % 5)]))
        finished.wait()

    threshold = gc.get_threshold()
    gc.freeze()
    gc.callbacks.append(collected)
    try:
        for _ in range(2):
            threading.Thread(target=call, daemon=True).start()
        finished.wait(60)
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*threshold)
        gc.unfreeze()
