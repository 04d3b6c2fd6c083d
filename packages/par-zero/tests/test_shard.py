"""The signature of `shard`, and the policies that it takes."""

import inspect
from dataclasses import fields

import pytest
import torch

from par_zero import MixedPrecision, Offload, OptimizerUpdate, Overlap, ParameterInit, ShardOptions, shard
from par_zero._policies import policy_of

POLICIES = {
    "precision": (MixedPrecision, {"param_dtype": torch.bfloat16}),
    "overlap": (Overlap, {"bucket": 300}),
    "offload": (Offload, {"optimizer": 0.5}),
    "update": (OptimizerUpdate, {"elementwise": True}),
    "init": (ParameterInit, {"device": torch.device("cpu")}),
}


def test_shard_has_twelve_parameters():
    keywords = inspect.signature(shard).parameters
    assert len(keywords) == 12
    assert {field.name for field in fields(ShardOptions)} < keywords.keys()
    assert POLICIES.keys() < keywords.keys()
    assert inspect.signature(ShardOptions.of).parameters.keys() == {field.name for field in fields(ShardOptions)}


@pytest.mark.parametrize("name", POLICIES)
def test_policy_may_be_an_object_a_mapping_or_none(name):
    kind, given = POLICIES[name]
    assert policy_of(kind, name, given) == policy_of(kind, name, kind(**given)) == kind(**given)
    assert policy_of(kind, name, None) == kind()
    with pytest.raises(TypeError, match=rf"{name}\['depth'\]: {kind.__name__} has no such argument; use one of"):
        policy_of(kind, name, {"depth": 2})
    with pytest.raises(TypeError, match=rf"{name}=3: pass a par_zero\.{kind.__name__}, a mapping of its arguments"):
        policy_of(kind, name, 3)
