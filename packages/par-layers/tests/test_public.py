import inspect

import pytest

import par_layers
from par_layers import LayerSet

CALLS = [
    *(getattr(par_layers, name) for name in par_layers.__all__ if inspect.isfunction(getattr(par_layers, name))),
    *(method for name, method in inspect.getmembers(LayerSet, inspect.isfunction) if not name.startswith("_")),
]


def test_every_public_name_is_there():
    for name in par_layers.__all__:
        assert getattr(par_layers, name) is not None
    assert par_layers.__all__ == sorted(par_layers.__all__)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_help_lists_every_keyword(call):
    for name, parameter in inspect.signature(call).parameters.items():
        assert parameter.kind not in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}
        assert name == "self" or parameter.annotation is not parameter.empty
        assert name == "self" or f"{name}: " in inspect.getdoc(call), name
