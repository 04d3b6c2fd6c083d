"""Steps of training, and what autograd keeps meanwhile as a witness counts it who knows nothing of this package."""

from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


def train(model, inputs, steps=3, backward=None):
    """Losses, and the gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, [parameter.grad for parameter in model.parameters()]


def equal(one, other):
    """Whether two results of `train` are the same bits."""
    return all(
        torch.equal(a, b) for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True)
    )


@contextmanager
def handed_on(module):
    """A dict that comes to have the bytes, by storage, of what autograd or a layer hands to the hooks around it."""
    fixed = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    sizes, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        alive.append(StorageWeakRef(storage))
        if storage._cdata not in fixed:
            sizes[storage._cdata] = storage.nbytes()
        return tensor if tensor.grad_fn is None else tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


class Living(TorchDispatchMode):
    """Counts the bytes of storages that operations have made since it was entered and that live still."""

    def __init__(self):
        super().__init__()
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return output

    def bytes(self):
        return sum(size for alive, size in self._made.values() if not alive.expired())


def flops(call):
    counter = FlopCounterMode(display=False)
    with counter:
        call()
    return counter.get_total_flops()
