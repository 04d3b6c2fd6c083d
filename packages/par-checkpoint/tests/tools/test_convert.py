"""What `convert` keeps, leaves out and refuses."""

import io
import json
import os
import pickle
import warnings
import zipfile

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import par_checkpoint as pc
from par_checkpoint.tools.cli import main
from par_checkpoint.tools.convert import convert_checkpoint

BESIDE = {
    "generation_config.json": b'{"eos_token_id": 1}',
    "tokenizer.json": b"{}",
    "source.spm": b"pieces",
    "additional_chat_templates/tool_use.jinja": b"tools",
}


def save_dcp(state, path):
    from torch.distributed.checkpoint import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=path, no_dist=True)


def converted(source, target):
    """What is left out, and the tensors."""
    return convert_checkpoint(str(source), str(target), to="huggingface"), load_file(target / "model.safetensors")


def test_convert_keeps_config_and_tokenizer(tmp_path):
    config = {"model_type": "x", "dtype": "float32", "text_config": {"torch_dtype": "float32", "width": 3}}
    pc.save(tmp_path / "a", model={"w": torch.ones(2)}, step=7, format=pc.Format(config=config))
    for name, data in BESIDE.items():
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(data)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    left_out = convert_checkpoint(str(tmp_path / "a"), str(tmp_path / "b"), to="huggingface", dtype="bfloat16")
    assert left_out == ["notes.txt"]
    assert {name: (tmp_path / "b" / name).read_bytes() for name in BESIDE} == BESIDE
    found = json.loads((tmp_path / "b" / "config.json").read_text())
    assert found == config | {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "width": 3}}
    assert pc.verify(tmp_path / "b") == []
    assert pc.inspect(tmp_path / "b").step == 7


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
def test_convert_names_what_it_leaves_out(tmp_path, capsys):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    pc.save(
        tmp_path / "a",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra={"a": 1},
        format=pc.Format(config={"b": 2}),
    )
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "left out: the optimizer, the scheduler, the extra\n" in capsys.readouterr().out
    left_out = convert_checkpoint(str(tmp_path / "a"), str(tmp_path / "c"), to="dcp")
    assert left_out == ["the optimizer", "the scheduler", "the extra", "config.json"]


def state_of(kind):
    """A run's state as trainers keep it, whose model has one weight, of ones."""
    weights, moments = {"net.weight": torch.ones(2)}, {"state": {"net.weight": {"exp_avg": torch.zeros(2)}}}
    return {
        "app": {"app": {"model": weights, "optim": moments}},
        "flat": {**weights, "optimizer": moments, "lr_scheduler": {"last": torch.zeros(1)}},
        "module": {"module": weights, "optimizer_states": moments},
        "model": {"model": weights, "ema": {"net.weight": torch.zeros(2)}},
    }[kind]


@pytest.mark.parametrize("is_dcp", [True, False])
@pytest.mark.parametrize("kind", ["app", "flat", "module", "model"])
def test_convert_takes_the_weights_of_a_run_alone(tmp_path, kind, is_dcp):
    source = tmp_path / "run.pt"
    save_dcp(state_of(kind), source) if is_dcp else torch.save(state_of(kind), source)
    left_out, tensors = converted(source, tmp_path / "b")
    assert {name: each.tolist() for name, each in tensors.items()} == {"net.weight": [1, 1]}
    assert any(word in left_out[0] for word in ("optim", "ema"))


def test_convert_of_several_models_is_refused(tmp_path):
    one = {"model": {"w": torch.ones(2)}, "optim": {}}
    torch.save({"a": one, "b": one}, tmp_path / "run.pt")
    with pytest.raises(pc.CheckpointError, match="there are models in 'a', 'b'"):
        converted(tmp_path / "run.pt", tmp_path / "b")
    deep = torch.ones(1)
    for _ in range(120):
        deep = {"a": deep}
    torch.save(deep, tmp_path / "deep.pt")
    with pytest.raises(pc.CheckpointError, match="is nested deeper than 100"):
        converted(tmp_path / "deep.pt", tmp_path / "b")


def dcp_folder(path, change=lambda _: None):
    """A folder of torch.distributed.checkpoint whose metadata is changed."""
    save_dcp({"a": torch.ones(10), "b": torch.ones(3)}, path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def chunk(metadata):
    return metadata.state_dict_metadata["a"].chunks[0]


def item(metadata, name="a"):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


LIES = {
    "no chunks": (lambda m: m.state_dict_metadata["a"].chunks.clear(), "its chunks 0 of them"),
    "many elements": (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([2**28])), "its chunks 10 of"),
    "too many elements": (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([2**61])), "cannot be"),
    "a chunk outside": (lambda m: setattr(chunk(m), "offsets", torch.Size([1])), "cannot be"),
    "chunks twice": (lambda m: m.state_dict_metadata["a"].chunks.append(chunk(m)), ""),
    "no place": (lambda m: m.storage_data.clear(), "has no place for its chunk"),
    "no items": (lambda m: setattr(m, "storage_data", None), "cannot be read"),
    "a dtype of its own": (
        lambda m: setattr(m.state_dict_metadata["a"].properties, "dtype", torch.float64),
        "is torch",
    ),
    "one place for two": (lambda m: setattr(item(m), "offset", item(m, "b").offset), "has something else before byte"),
    "behind the end": (lambda m: setattr(item(m), "length", 2**40), "ends at byte"),
    "a negative place": (lambda m: setattr(item(m), "offset", -1), "places 'a' at byte -1"),
    "compressed": (lambda m: setattr(item(m), "transform_descriptors", ["zstd"]), "is compressed by an extension"),
    "no mapping": (lambda m: setattr(m, "state_dict_metadata", 5), "cannot be read"),
}


@pytest.mark.parametrize("lie", LIES)
def test_convert_of_dcp_whose_metadata_lies_is_refused(tmp_path, lie):
    change, words = LIES[lie]
    dcp_folder(tmp_path / "dcp", change)
    if not words:  # harmless
        assert converted(tmp_path / "dcp", tmp_path / "new")[1]["a"].tolist() == [1] * 10
        return
    with pytest.raises(pc.CheckpointError, match=words):
        converted(tmp_path / "dcp", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def flip(path):
    data = bytearray(path.read_bytes())
    data[600] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (os.remove, "is missing, but .metadata lists it"),
        (lambda path: os.truncate(path, 1500), "ends at byte 1500"),
        (lambda path: os.truncate(path, 0), "ends at byte 0"),
        (flip, "cannot be read"),
    ],
)
def test_convert_of_damaged_dcp_names_the_file(tmp_path, capsys, damage, words):
    save_dcp({"model": {"a": torch.ones(1000)}}, tmp_path / "dcp")
    damage(tmp_path / "dcp" / "__0_0.distcp")
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "new")]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "__0_0.distcp" in error
    assert not (tmp_path / "new").exists()


def test_convert_of_deflated_dcp_items_is_refused(tmp_path):
    dcp_folder(tmp_path / "dcp")
    stored, deflated = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(10), stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    file = next((tmp_path / "dcp").glob("*.distcp"))
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    item(metadata).offset, item(metadata).length = file.stat().st_size, len(deflated.getvalue())
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    file.write_bytes(file.read_bytes() + deflated.getvalue())
    with pytest.raises(pc.CheckpointError, match=r"is compressed, .* which torch.save never does"):
        converted(tmp_path / "dcp", tmp_path / "new")


BASE = torch.zeros(1000)

GROWN = {
    "expanded": ({"w": torch.zeros(1).expand(1 << 40)}, "is expanded, 4398046511104 bytes of which 4 are stored"),
    "views": ({f"w{at}": BASE[at:] for at in range(20)}, "views that share 4000 bytes, and would take 79240"),
    "sparse": ({"w": torch.eye(3).to_sparse()}, "is torch.sparse_coo on cpu, not a dense tensor"),
    "meta": ({"w": torch.empty(3, device="meta")}, "on meta, not a dense tensor"),
    "negated": ({"w": torch.ones(3, dtype=torch.complex64).conj().imag}, "is conjugated or negated lazily"),
}


@pytest.mark.parametrize("kind", GROWN)
def test_convert_of_tensors_that_the_file_does_not_hold_is_refused(tmp_path, kind):
    value, words = GROWN[kind]
    torch.save(value, tmp_path / "a.pt")
    (tmp_path / "a").mkdir()
    torch.save(value, tmp_path / "a" / "pytorch_model.bin")
    for source in ("a.pt", "a"):
        with pytest.raises(pc.CheckpointError, match=words):
            converted(tmp_path / source, tmp_path / "new")


def test_convert_of_tied_and_fused_tensors_is_no_growth(tmp_path):
    fused = torch.arange(6.0)
    torch.save(
        {"qkv": fused, "q": fused[:2], "k": fused[2:4], **{f"tied{n}": fused for n in range(20)}}, tmp_path / "a"
    )
    assert converted(tmp_path / "a", tmp_path / "new")[1]["k"].tolist() == [2, 3]


def test_convert_to_dcp_at_a_url_is_refused(tmp_path):
    pc.save(tmp_path / "a", model={"w": torch.ones(2)})
    with pytest.raises(ValueError, match="target='memory://x/dcp': a DCP folder is written to local disks"):
        convert_checkpoint(str(tmp_path / "a"), "memory://x/dcp", to="dcp")
