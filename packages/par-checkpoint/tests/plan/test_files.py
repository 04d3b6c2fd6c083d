import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_checkpoint.plan.files import fill, shard_names


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 10))
def test_files_are_filled_as_transformers_fills_them(sizes, limit):
    hub = pytest.importorskip("huggingface_hub")
    named = {f"t{number}": size for number, size in enumerate(sizes)}
    split = hub.split_state_dict_into_shards_factory(
        named, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    ours = fill(list(named.items()), limit)
    assert ours == list(split.filename_to_tensors.values())
    assert shard_names(len(ours)) == list(split.filename_to_tensors)


def test_a_tensor_over_the_limit_has_its_own_file_before_the_open_one():
    assert fill([("a", 2), ("big", 9), ("b", 2), ("c", 2)], 5) == [["big"], ["a", "b"], ["c"]]


def test_a_limit_below_a_byte_is_refused():
    with pytest.raises(ValueError, match="limit 0"):
        fill([("a", 1)], 0)


def test_one_file_is_not_numbered_unless_asked():
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(1, "optimizer/optimizer", always_numbered=True) == [
        "optimizer/optimizer-00001-of-00001.safetensors"
    ]
    assert shard_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
