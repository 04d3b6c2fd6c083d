"""What the table says of an optimizer's class, and when it says nothing. No ranks."""

import importlib
import inspect

import torch
from torch import nn

from par_groups import UpdateScope, update_scope_of
from par_groups.optimizers.classes import KNOWN
from par_testing import for_each


def scope(optimizer):
    return update_scope_of(optimizer, optimizer.param_groups[0])


def made(kind=torch.optim.SGD, **settings):
    return kind([nn.Parameter(torch.ones(2, 2))], lr=0.1, **settings)


def stand_in(module, name, **attributes):
    """A class under the name of another package's, which need not be installed."""
    return type(name, (torch.optim.SGD,), {"__module__": module, "__qualname__": name, **attributes})


def step(self, closure=None):
    """A step of a class's own."""


LISTED = {
    "torch.optim.adam.Adam": UpdateScope.ELEMENT,
    "torch.optim._adafactor.Adafactor": UpdateScope.TENSOR,
    "bitsandbytes.optim.adamw.AdamW8bit": UpdateScope.TENSOR,
    "torchao.prototype.AdamW8bit": UpdateScope.UNKNOWN,
    "torchao.optim.adam.AdamW8bit": UpdateScope.TENSOR,
    "prodigyopt.prodigy.Prodigy": UpdateScope.MODEL,
    "dadaptation.dadapt_adan.DAdaptAdan": UpdateScope.MODEL,
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": UpdateScope.ELEMENT,
    "schedulefree.adamw_schedulefree_closure.AdamWScheduleFreeClosure": UpdateScope.UNKNOWN,
    "lion_pytorch.lion_pytorch.Lion": UpdateScope.ELEMENT,
    "lion_pytorch.cautious_lion.Lion": UpdateScope.TENSOR,
    "transformers.optimization.Adafactor": UpdateScope.TENSOR,
    "came_pytorch.CAME.CAME": UpdateScope.TENSOR,
    "__main__.AdamW": UpdateScope.UNKNOWN,
    "timm_fork.optim.Lion": UpdateScope.UNKNOWN,
}


@for_each(name=LISTED)
def test_scope_by_package_and_class_needs_no_package(name):
    module, _, kind = name.rpartition(".")
    assert scope(made(stand_in(module, kind, step=step))) is LISTED[name]


@for_each(name=[name for names in KNOWN["torch.optim"].values() for name in names.split()])
def test_scope_lists_classes_that_torch_has(name):
    kind = getattr(torch.optim, name)
    assert scope(made(kind)) is next(each for each, names in KNOWN["torch.optim"].items() if name in names.split())


def test_table_lists_all_of_torch_but_sparse_adam():
    kinds = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    listed = {name for names in KNOWN["torch.optim"].values() for name in names.split()}
    assert {name for name in kinds if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)} == {
        *listed,
        "Optimizer",
        "SparseAdam",
    }


def test_scope_is_wider_with_settings_that_look_further():
    kind = stand_in("timm.optim.lion", "Lion", step=step)
    for caution, wanted in ((False, UpdateScope.ELEMENT), (True, UpdateScope.TENSOR)):
        optimizer = made(kind)
        optimizer.param_groups[0]["caution"] = caution
        assert scope(optimizer) is wanted
    optimizer = made(stand_in("pytorch_optimizer.optimizer.adan", "Adan", step=step))
    optimizer.param_groups[0] |= {"use_gc": True, "max_grad_norm": 1.0}
    assert scope(optimizer) is UpdateScope.MODEL


class Same(torch.optim.SGD):
    """Another constructor, and another way to drop gradients."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)

    def zero_grad(self):
        super().zero_grad()


class OwnStep(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class OwnHelper(torch.optim.SGD):
    def _init_group(self, *args):
        return super()._init_group(*args)


class OwnMode(torch.optim.SGD):
    def eval(self):
        """Could do anything to the tensors."""


SUBCLASSES = {
    Same: UpdateScope.ELEMENT,
    OwnStep: UpdateScope.UNKNOWN,
    OwnHelper: UpdateScope.UNKNOWN,
    OwnMode: UpdateScope.UNKNOWN,
}


@for_each(kind=SUBCLASSES)
def test_scope_of_a_subclass_depends_on_what_it_overrides(kind):
    assert scope(made(kind)) is SUBCLASSES[kind]
    assert scope(made(type("Further", (kind,), {}))) is SUBCLASSES[kind]


def test_scope_sees_through_schedulers_and_compile_only():
    optimizer = made()
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert scope(optimizer) is UpdateScope.ELEMENT
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    assert scope(optimizer) is UpdateScope.ELEMENT
    optimizer.step = lambda: None
    assert scope(optimizer) is UpdateScope.UNKNOWN


def test_table_imports_no_other_package():
    source = inspect.getsource(importlib.import_module("par_groups.optimizers.classes"))
    assert {line.split()[1] for line in source.splitlines() if line.startswith(("import", "from"))} == {
        "collections.abc",
        "enum",
    }
