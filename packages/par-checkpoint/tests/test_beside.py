"""What a save writes beside the tensors: further files as they are, and the model's files under another name."""

import json

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from par_checkpoint import (
    CheckpointError,
    Checkpoints,
    Format,
    Tiers,
    inspect,
    load,
    read_tensor,
    save,
    verify,
)

from .helpers import rectangle

TOKENIZER = {
    "tokenizer.json": b'{"version": "1.0"}\r\n',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": "{{ bos }} \u00e9".encode(),
    "merges.txt": b"\xff\x00",
}


@pytest.fixture
def folder(tmp_path):
    """A model's folder, with its tokenizer and much that is not."""
    folder = tmp_path / "model"
    folder.mkdir()
    others = {"config.json": b"{}", "README.md": b"x", "generation_config.json": b"{}", "model.safetensors": b"x"}
    for name, data in {**TOKENIZER, **others}.items():
        (folder / name).write_bytes(data)
    (folder / "tokenizer_more").mkdir()
    return folder


def files_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def test_files_are_copied_byte_for_byte(folder, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_bytes(b"\r\nmine")
    save(
        tmp_path / "c", model={"w": torch.ones(3)}, format=Format(config={"model_type": "mine"}, assets=[folder, notes])
    )
    found = files_of(tmp_path / "c")
    ours = {"config.json", "model.safetensors", "par_checkpoint.json"}
    assert found.keys() == {*TOKENIZER, "notes.txt", *ours}
    assert {name: found[name] for name in TOKENIZER} == TOKENIZER
    assert found["notes.txt"] == b"\r\nmine"
    assert json.loads(found["config.json"]) == {"model_type": "mine"}
    assert verify(tmp_path / "c") == []
    load(tmp_path / "c", model={"w": torch.zeros(3)}, verify="full")
    (tmp_path / "c/tokenizer.json").write_bytes(b"edited")
    assert verify(tmp_path / "c", deep=False) == []
    load(tmp_path / "c", model={"w": torch.zeros(3)})
    (tmp_path / "c/tokenizer.json").unlink()
    [wrong] = verify(tmp_path / "c")
    assert "tokenizer.json is missing, but was saved with the weights" in wrong


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_verify_full_finds_a_flipped_bit_beside_the_tensors(folder, tmp_path, name):
    (folder / "generation_config.json").write_bytes(b'{"a": 1}')
    save(
        tmp_path / "c",
        model={"w": torch.ones(3)},
        format=Format(config={"b": 2}, assets=[folder, folder / "generation_config.json"]),
    )
    path = tmp_path / "c" / name
    path.write_bytes(path.read_bytes().replace(b"1", b"3").replace(b"2", b"0"))
    [wrong] = verify(tmp_path / "c")
    assert f"{name} is not what was saved, but edited or damaged" in wrong
    into = {"w": torch.zeros(3)}
    with pytest.raises(
        CheckpointError, match=r"edited or damaged.*Nothing was changed; verify='auto' loads all the same"
    ):
        load(tmp_path / "c", model=into, verify="full")
    assert into["w"].tolist() == [0.0] * 3
    load(tmp_path / "c", model=into)


def test_a_folder_stands_for_all_of_its_tokenizer(tmp_path):
    names = ["source.spm", "dict.txt", "bpe.codes", "emoji.json", "my_vocab_of_2027.json", "a.tiktoken", "x.model"]
    others = ["trainer_state.json", "all_results.json", "config.json", "model.safetensors.index.json", "README.md"]
    folder, template = tmp_path / "t", "additional_chat_templates/tool_use.jinja"
    (folder / template).parent.mkdir(parents=True)
    for name in (*names, *others, template, "run.log"):
        (folder / name).write_text(name)
    with pytest.warns(UserWarning, match=r"of which all_results\.json, run\.log, trainer_state\.json are not known"):
        save(tmp_path / "c", model={"w": torch.ones(3)}, format=Format(assets=[folder]))
    assert files_of(tmp_path / "c").keys() == {*names, "model.safetensors", "par_checkpoint.json"}
    assert (tmp_path / "c" / template).read_text() == template
    assert verify(tmp_path / "c") == []
    save(tmp_path / "c", model={"w": torch.ones(3)}, overwrite=True)
    assert (tmp_path / "c" / template).read_text() == template, "it is carried over"
    assert {"source.spm", "dict.txt", "bpe.codes", "emoji.json", "a.tiktoken"} <= files_of(tmp_path / "c").keys()


def test_a_dangling_link_among_the_assets_is_refused(folder, tmp_path):
    (folder / "vocab.json").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"vocab\.json', where there is no file"):
        save(tmp_path / "c", model={"w": torch.ones(3)}, format=Format(assets=[folder]))


@pytest.mark.parametrize("root", ["memory://beside-of-a-store", "copies"])
def test_chat_templates_reach_every_kind_of_place(tmp_path, root):
    (tmp_path / "t/additional_chat_templates").mkdir(parents=True)
    (tmp_path / "t/additional_chat_templates/a.jinja").write_text("a")
    (tmp_path / "t/my.json").write_text("{}")
    tiers = Tiers([tmp_path / "near", tmp_path / "far"], copies=1) if root == "copies" else None
    name = "c" if tiers else f"{root}/c"
    for assets in ([tmp_path / "t"], [], []):
        save(name, model={"w": torch.ones(3)}, overwrite=True, format=Format(assets=assets), tiers=tiers).wait()
        assert verify(tmp_path / "far/c" if tiers else name) == []
    load(name, model={"w": torch.zeros(3)}, verify="full", tiers=tiers)


def test_links_are_followed(folder, tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(folder / "tokenizer.json")  # as in the hub's cache
    save(tmp_path / "c", model={"w": torch.ones(3)}, format=Format(assets=[tmp_path / "tokenizer.json"]))
    copy = tmp_path / "c/tokenizer.json"
    assert not copy.is_symlink()
    assert copy.read_bytes() == TOKENIZER["tokenizer.json"]


@pytest.mark.parametrize("style", ["huggingface", "torch"])
def test_an_old_checkpoint_with_assets_is_replaced(style, folder, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    model = {"w": torch.ones(3)}
    save(tmp_path / "c", model=model, format=Format(style=style, assets=[folder, notes]))
    save(tmp_path / "c", model=model, overwrite=True, format=Format(style=style))
    assert TOKENIZER.keys() <= files_of(tmp_path / "c").keys(), "a tokenizer is carried over"
    assert "notes.txt" not in files_of(tmp_path / "c"), "what has no place beside weights is not"
    save(tmp_path / "c", model=model, overwrite=True, format=Format(style=style))


@pytest.mark.ranks(2)
def test_the_first_rank_reads_them(tmp_path):
    rank = dist.get_rank()
    asset = tmp_path / f"vocab.{rank}"
    asset.write_text(str(rank))
    save(tmp_path / "c", model={"w": torch.ones(3)}, async_=True, format=Format(assets=[asset])).wait()
    dist.barrier()
    assert [name for name in sorted(files_of(tmp_path / "c")) if "vocab" in name] == ["vocab.0"]


def test_options_and_checkpoints_take_them(folder, tmp_path):
    files = Format(assets=[folder], stem="adapter_model")
    Checkpoints(tmp_path / "run", every=1).save(1, model={"w": torch.ones(3)}, format=files)
    found = files_of(tmp_path / "run/step-00000001")
    assert {*TOKENIZER, "adapter_model.safetensors"} <= found.keys()
    into = {"w": torch.zeros(3)}
    assert Checkpoints(tmp_path / "run", every=1).load(model=into).step == 1
    assert into["w"].tolist() == [1.0] * 3


@pytest.mark.ranks(2)
def test_wrong_assets_are_refused_on_every_rank(tmp_path):
    def file(name):
        path = tmp_path / str(dist.get_rank()) / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
        return path

    (tmp_path / str(dist.get_rank()) / "empty").mkdir(parents=True)
    for assets, kind, words in (
        ("tokenizer.json", TypeError, "assets is 'tokenizer.json'; give a list of paths"),
        (file("vocab.txt"), TypeError, "give a list of paths"),
        ([3], TypeError, "assets has 3; each item is the path"),
        ([tmp_path / "none"], ValueError, "where there is no file; correct the path, as rank 0 sees it"),
        ([tmp_path / str(dist.get_rank()) / "empty"], ValueError, "holds no file of a tokenizer; name the files"),
        ([file(".hidden")], ValueError, "whose name is hidden"),
        ([file("a/vocab.txt"), file("b/vocab.txt")], ValueError, r"vocab\.txt comes from elsewhere too"),
        ([file("config.json")], ValueError, r"config\.json comes from elsewhere too"),
        ([file("model.safetensors")], ValueError, "hold tensors here; give `model`"),
        ([file("model.safetensors.index.json")], ValueError, "hold tensors here"),
        ([file("par_checkpoint.json")], ValueError, "hold tensors here"),
    ):
        with pytest.raises(kind, match=words):
            save(tmp_path / "c", model={"w": torch.ones(3)}, format=Format(config={"a": 1}, assets=assets))
    assert not (tmp_path / "c").exists()


# Another stem


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(2)
def test_an_adapter_has_its_own_names(tmp_path):
    rank, size = dist.get_rank(), (7, 5)
    value = torch.arange(35.0).view(size)
    low, high = ((0, 4), (4, 7))[rank]
    names = ("base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight")
    model = {name: (value * n)[low:high].contiguous() for n, name in enumerate(names, 1)}
    layout = {name: rectangle(size, 0, low, high, rank) for name in names}
    (tmp_path / f"{rank}").mkdir()
    config = tmp_path / f"{rank}" / "adapter_config.json"
    config.write_text('{"peft_type": "LORA"}')
    for limit, files in (("5GB", 1), (150, 2)):
        path = tmp_path / f"c{files}"
        for _ in range(2):  # another adapter takes its place
            save(
                path,
                model=model,
                overwrite=True,
                format=Format(max_shard_size=limit, stem="adapter_model", layout=layout, assets=[config]),
            )
        dist.barrier()
        found = {file.name for file in path.iterdir()}
        shards = {f"adapter_model-0000{n}-of-00002.safetensors" for n in (1, 2)}
        weights = {"adapter_model.safetensors"} if files == 1 else {*shards, "adapter_model.safetensors.index.json"}
        assert found == {*weights, "adapter_config.json", "par_checkpoint.json"}
        assert verify(path) == []
        assert inspect(path).tensors.keys() == set(names)
        assert torch.equal(read_tensor(path, names[1]), value * 2)
        into = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        load(path, model=into, format=Format(layout=layout))
        assert all(torch.equal(into[name], tensor) for name, tensor in model.items())


def test_a_layout_keeps_a_plan_for_each_stem(tmp_path):
    model = {"w": torch.ones(3)}
    for stem in ("model", "adapter_model", "model"):
        save(tmp_path / "c", model=model, overwrite=True, format=Format(stem=stem))
        assert files_of(tmp_path / "c").keys() == {f"{stem}.safetensors", "par_checkpoint.json"}
        into = {"w": torch.zeros(3)}
        load(tmp_path / "c", model=into)
        assert into["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize("pickled", [False, True])
def test_an_adapter_of_others_is_loaded_and_replaced(pickled, tmp_path):
    state = {"lora_A": torch.randn(2, 3)}
    tmp_path = tmp_path / "adapter"
    tmp_path.mkdir()
    if pickled:
        torch.save(state, tmp_path / "adapter_model.bin")
    else:
        safetensors.torch.save_file(state, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    into = {"lora_A": torch.zeros(2, 3)}
    with pytest.raises(CheckpointError, match=r"no weights under any of these names: model\.safetensors"):
        load(tmp_path, model=into)
    load(tmp_path, model=into, format=Format(stem="adapter_model"))
    assert torch.equal(into["lora_A"], state["lora_A"])
    save(tmp_path, model=into, overwrite=True, format=Format(stem="adapter_model"))
    assert files_of(tmp_path).keys() == {"adapter_model.safetensors", "adapter_config.json", "par_checkpoint.json"}


@pytest.mark.ranks(2)
def test_wrong_stems_are_refused_on_every_rank(tmp_path):
    for stem in ("", "a/b", "..", "model-00001-of-00002", "par_checkpoint", 3):
        with pytest.raises(
            ValueError, match=r"stem is .*; give letters, digits and underscores, such as 'adapter_model'"
        ):
            save(tmp_path / "c", model={"w": torch.ones(3)}, format=Format(stem=stem))
        with pytest.raises(ValueError, match="stem is"):
            load(tmp_path / "c", model={"w": torch.ones(3)}, format=Format(stem=stem))
    with pytest.raises(ValueError, match="stem is 'adapter_model', but style 'torch' names its files itself"):
        save(tmp_path / "c", model={"w": torch.ones(3)}, format=Format(style="torch", stem="adapter_model"))
    assert not (tmp_path / "c").exists()
