import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_checkpoint._errors import CorruptError
from par_checkpoint.format.manifest import decode_index, encode_index, is_base_name

NAMES = st.text(max_size=5)


@given(st.dictionaries(NAMES, st.sampled_from(["a.safetensors", "ü.safetensors"])))
def test_an_index_comes_back(weight_map):
    assert decode_index(encode_index(weight_map, 12, 3), "index") == weight_map


def test_it_is_what_transformers_writes(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    theirs = (tmp_path / "model.safetensors.index.json").read_bytes()
    weight_map = json.loads(theirs)["weight_map"]
    state = model.state_dict()
    assert set(weight_map) == set(state)
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert encode_index(weight_map, total, sum(tensor.numel() for tensor in state.values())) == theirs


BAD = ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "..\\x", "x\0", ".hidden", "a\nb", "\ud800", "optimizer/x"]


@pytest.mark.parametrize("name", BAD)
def test_a_file_elsewhere_is_refused(name):
    assert not is_base_name(name)
    with pytest.raises(CorruptError, match="only plain names"):
        decode_index(encode_index({"w": name}, 1, 1), "index")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "a..b", "with space.bin", "模型.safetensors"])
def test_a_plain_name_is_taken(name):
    assert is_base_name(name)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "x", "a": "y"}}',
        b'{"weight_map": {}, "weight_map": {}}',
        b'{"weight_map": {"a": null}}',
        b'{"weight_map": ' + b"[" * 100_000,
        b"\xff",
    ],
)
def test_what_is_no_index_is_refused(data):
    with pytest.raises(CorruptError, match="folder/index"):
        decode_index(data, "folder/index")
