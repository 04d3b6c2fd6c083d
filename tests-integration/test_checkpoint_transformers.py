"""What transformers saves we load, and what we save it loads: whole, cut over ranks, bit for bit."""

import contextlib
import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import par_checkpoint
from par_checkpoint import CheckpointError, TensorSlice
from par_groups import Box, Sharding

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
}
FAMILIES = {  # transformers loads the classes here, once for all ranks
    "llama": (transformers.LlamaForCausalLM, {**TEXT, "tie_word_embeddings": False}),
    "tied llama": (transformers.LlamaForCausalLM, {**TEXT, "tie_word_embeddings": True}),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32},
    ),
    "mixtral": (transformers.MixtralForCausalLM, {**TEXT, "num_local_experts": 4, "tie_word_embeddings": False}),
    "qwen2": (transformers.Qwen2ForCausalLM, {**TEXT, "tie_word_embeddings": True}),
    "t5": (
        transformers.T5ForConditionalGeneration,
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 64,
            "decoder_start_token_id": 0,
        },
    ),
    "bert": (transformers.BertForMaskedLM, {**TEXT, "max_position_embeddings": 32}),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def build(family, seed=0):
    torch.manual_seed(seed)
    kind, settings = FAMILIES[family]
    model = kind(kind.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)  # norms and biases, too: no two tensors are alike
    return model


def opened(path, kind):
    """What transformers reads, which must be neither more nor less than what there is."""
    model, info = kind.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def assert_same_state(model, other):
    mine, others = model.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, others[name]), name


@torch.no_grad()
def logits(model):
    ids = torch.arange(12).view(2, 6)
    inputs = {"input_ids": ids, "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}
    return model(**inputs).logits


def stored(path):
    """Every tensor of a folder's safetensors files."""
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in safetensors.load_file(file).items()}


def assert_same_files(path, other):
    mine, others = stored(path), stored(other)
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, others[name]), name


# One process


@every_family
@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_transformers_loads_what_we_save(family, size, tmp_path):
    model = build(family)
    par_checkpoint.save(
        tmp_path / "ours", model=model, format=par_checkpoint.Format(max_shard_size=size, config=model.config)
    )
    assert (tmp_path / "ours/model.safetensors").exists() == (size == "5GB")
    loaded = opened(tmp_path / "ours", type(model))
    assert_same_state(loaded, model)
    assert torch.equal(logits(loaded), logits(model))
    model.save_pretrained(tmp_path / "theirs")
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("family", ["tied llama", "mixtral"])
def test_auto_classes_open_what_we_save(family, tmp_path):
    model = build(family)
    par_checkpoint.save(
        tmp_path / "c", model=model, format=par_checkpoint.Format(max_shard_size="20KB", config=model.config)
    )
    assert_same_state(opened(tmp_path / "c", transformers.AutoModelForCausalLM), model)


@every_family
@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_we_load_what_transformers_saves(family, size, tmp_path):
    model, other = build(family), build(family, seed=1)
    model.save_pretrained(tmp_path, max_shard_size=size)
    report = par_checkpoint.load(tmp_path, model=other)
    assert report.missing == report.unexpected == report.mismatched == ()
    assert_same_state(other, model)
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("family", ["tied llama", "mixtral", "gpt2"])
def test_the_variant_that_is_asked_for_is_read(family, tmp_path):
    plain, model, other = build(family), build(family, seed=1), build(family, seed=2)
    plain.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    par_checkpoint.load(tmp_path, model=other, format=par_checkpoint.Format(variant="fp16"))
    assert_same_state(other, model)
    par_checkpoint.load(tmp_path, model=other)
    assert_same_state(other, plain)


def write_pickles(state, path, parts):
    """The files that transformers wrote before safetensors."""
    path.mkdir()
    if parts == 1:
        torch.save(state, path / "pytorch_model.bin")
        return
    files = [f"pytorch_model-{i + 1:05}-of-{parts:05}.bin" for i in range(parts)]
    weight_map = {name: files[i % parts] for i, name in enumerate(state)}
    for file in files:
        torch.save({name: state[name] for name, where in weight_map.items() if where == file}, path / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@every_family
@pytest.mark.parametrize("parts", [1, 3])
def test_we_load_pickled_weights(family, parts, tmp_path):
    model, other = build(family), build(family, seed=1)
    model.save_pretrained(tmp_path / "theirs")
    for number, state in enumerate((dict(model.state_dict()), stored(tmp_path / "theirs"))):
        write_pickles(state, tmp_path / str(number), parts)
        with torch.no_grad():
            next(other.parameters()).zero_()
        par_checkpoint.load(tmp_path / str(number), model=other)
        assert_same_state(other, model)


def test_pickled_tied_weights_that_differ_are_refused(tmp_path):
    model, other = build("tied llama"), build("tied llama", seed=1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"] += 1
    write_pickles(state, tmp_path / "c", 1)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="are one tensor in the model, but differ"):
        par_checkpoint.load(tmp_path / "c", model=other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_packed_experts_load_from_files_that_pack_them_too(tmp_path):
    model, other = build("mixtral"), build("mixtral", seed=1)
    safetensors.save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    par_checkpoint.load(tmp_path, model=other)
    assert_same_state(other, model)


def test_a_missing_expert_is_named(tmp_path):
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    files = stored(tmp_path)
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del files[lost]
    safetensors.save_file(files, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing in the checkpoint: {lost}"):
        par_checkpoint.load(tmp_path, model=model)


def test_weights_of_another_dtype_are_listed_and_cast_when_asked(tmp_path):
    model, other = build("mixtral"), build("mixtral", seed=1)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"experts\.3\.w2\.weight' is torch\.bfloat16 .*torch\.float32"):
        par_checkpoint.load(tmp_path, model=other)
    par_checkpoint.load(tmp_path, model=other, dtype=torch.float32)
    assert_same_state(other, model.to(torch.float32))


def test_a_model_is_made_from_the_meta_device(tmp_path):
    model = build("tied llama")
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        other = type(model)(model.config).eval()
    par_checkpoint.load(tmp_path, model=other)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert other.lm_head.weight is other.model.embed_tokens.weight


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, seed=0):
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("family", ["tied llama", "mixtral", "t5"])
def test_training_goes_on_as_if_it_had_not_stopped(family, tmp_path):
    model, other = build(family), build(family, seed=1)
    optimizer, others = optimizer_of(model), optimizer_of(other)
    step(model, optimizer)
    par_checkpoint.save(
        tmp_path / "c",
        model=model,
        optimizer=optimizer,
        step=1,
        format=par_checkpoint.Format(max_shard_size="20KB", config=model.config),
    )
    assert_same_state(opened(tmp_path / "c", type(model)), model)
    assert par_checkpoint.load(tmp_path / "c", model=other, optimizer=others).step == 1
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(other, others, seed)
    assert_same_state(other, model)


# Several ranks, each with its share of the tensors


ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")


def cut(shape, dim, part, parts, copies):
    """One of equal slices along a dim, contiguous in memory."""
    size = [length // parts if d == dim else length for d, length in enumerate(shape)]
    start = [size[dim] * part if d == dim else 0 for d in range(len(shape))]
    strides = torch.empty(size, device="meta").stride()
    return Sharding(tuple(shape), (Box(tuple(start), tuple(size), 0, strides, tuple(copies)),))


def share_of(whole, sharding):
    (box,) = sharding.boxes
    return whole[box.slices].clone()


def tensor_parallel(files, part, parts, copies):
    """A rank's share of a Llama's tensors, and the layout that says so; norms are whole."""
    layout = {}
    for name, tensor in files.items():
        module = name.split(".")[-2]
        if module in ROWS + COLUMNS:
            layout[name] = cut(tensor.shape, int(module in COLUMNS), part, parts, copies)
    local = {name: share_of(each, layout[name]) if name in layout else each.clone() for name, each in files.items()}
    return local, layout


def zeros_like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_equal(tensors, others):
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


@contextlib.contextmanager
def first_rank():
    """True on rank 0, for which the others wait."""
    yield dist.get_rank() == 0
    dist.barrier()


@pytest.fixture
def folder(request, tmp_path):
    """A model of the family that the test names, as transformers saves it."""
    build(request.param).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return tmp_path


def of_family(*families):
    return pytest.mark.parametrize("folder", families, indirect=True)


@of_family("llama")
@pytest.mark.ranks(4)
def test_llama_in_four_tensor_parallel_parts(folder):
    files = stored(folder / "theirs")
    expected, layout = tensor_parallel(files, dist.get_rank(), 4, (dist.get_rank(),))
    local = zeros_like(expected)
    par_checkpoint.load(folder / "theirs", model=local, format=par_checkpoint.Format(layout=layout))
    assert_equal(local, expected)
    par_checkpoint.save(
        folder / "ours", model=local, format=par_checkpoint.Format(max_shard_size="20KB", layout=layout)
    )
    assert_same_files(folder / "ours", folder / "theirs")


def query_key_value(name, shape):
    """Three tensors of the files are one in memory: the whole q, then k, then v."""
    if "qkv" not in name:
        return None
    rows, columns = shape[0] // 3, shape[1]
    return [
        TensorSlice(name=name.replace("qkv", f"{each}_proj"), shape=(rows, columns), start=(i * rows, 0), dims=(0, 1))
        for i, each in enumerate("qkv")
    ]


@of_family("llama")
@pytest.mark.ranks(4)
def test_fused_projections_in_four_parts(folder):
    """A local tensor is its heads of q, of k and of v, one below the other."""
    files, rank = stored(folder / "theirs"), dist.get_rank()
    expected, layout = tensor_parallel(files, rank, 4, (rank,))
    for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
        shares = [expected.pop(f"{layer}{each}_proj.weight") for each in "qkv"]
        boxes = tuple(Box((32 * i + 8 * rank, 0), (8, 32), 256 * i, (32, 1), (rank,)) for i in range(3))
        expected[f"{layer}qkv.weight"] = torch.cat(shares)
        layout[f"{layer}qkv.weight"] = Sharding((96, 32), boxes)
    layout = {name: each for name, each in layout.items() if name in expected}
    local = zeros_like(expected)
    par_checkpoint.load(
        folder / "theirs", model=local, format=par_checkpoint.Format(layout=layout, convert=query_key_value)
    )
    assert_equal(local, expected)
    par_checkpoint.save(
        folder / "ours", model=local, format=par_checkpoint.Format(layout=layout, convert=query_key_value)
    )
    assert_same_files(folder / "ours", folder / "theirs")


@of_family("gpt2")
@pytest.mark.ranks(4)
def test_gpt2_whose_files_hold_q_k_and_v_fused(folder):
    """Conv1D: a rank has its columns of each third of [32, 96]."""
    files, rank = stored(folder / "theirs"), dist.get_rank()
    layout, expected = {}, dict(files)
    for name, tensor in files.items():
        if name.endswith("c_attn.weight"):
            boxes = tuple(Box((0, 32 * i + 8 * rank), (32, 8), 8 * i, (24, 1), (rank,)) for i in range(3))
        elif name.endswith("c_attn.bias"):
            boxes = tuple(Box((32 * i + 8 * rank,), (8,), 8 * i, (1,), (rank,)) for i in range(3))
        else:
            continue
        layout[name] = Sharding(tuple(tensor.shape), boxes)
        expected[name] = torch.cat([tensor[box.slices] for box in boxes], -1)
    local = zeros_like(expected)
    par_checkpoint.load(folder / "theirs", model=local, format=par_checkpoint.Format(layout=layout))
    assert_equal(local, expected)
    par_checkpoint.save(
        folder / "ours", model=local, format=par_checkpoint.Format(max_shard_size="20KB", layout=layout)
    )
    assert_same_files(folder / "ours", folder / "theirs")


@of_family("tied llama")
@pytest.mark.ranks(8)
def test_tied_llama_over_tensor_pipeline_and_data_parallel_ranks(folder):
    rank = dist.get_rank()
    replica, stage, part = rank // 4, rank // 2 % 2, rank % 2
    files = stored(folder / "theirs")
    files["lm_head.weight"] = files["model.embed_tokens.weight"]  # the last stage has the table a second time
    stages = ["embed_tokens", "layers.0."], ["layers.1.", "model.norm.", "lm_head"]
    files = {name: tensor for name, tensor in files.items() if any(each in name for each in stages[stage])}
    expected, layout = tensor_parallel(files, part, 2, (rank, rank + 4 - 8 * replica))
    one_name = {"lm_head.weight": "model.embed_tokens.weight"} if stage else {}
    for path, names in ((folder / "two names", {}), (folder / "one name", one_name)):
        par_checkpoint.save(
            path, model=expected, format=par_checkpoint.Format(max_shard_size="20KB", layout=layout, names=names)
        )
        local = zeros_like(expected)
        par_checkpoint.load(path, model=local, format=par_checkpoint.Format(layout=layout, names=names))
        assert_equal(local, expected)
    with first_rank() as first:
        if first:
            assert_same_files(folder / "one name", folder / "theirs")
            model = opened(folder / "theirs", transformers.AutoModelForCausalLM)
            for path in (folder / "two names", folder / "one name"):
                (path / "config.json").write_text((folder / "theirs/config.json").read_text())
                assert len(list(path.glob("*.safetensors"))) > 2
                other = opened(path, transformers.AutoModelForCausalLM)
                assert_same_state(other, model)
                assert other.lm_head.weight is other.model.embed_tokens.weight
                assert torch.equal(logits(other), logits(model))


@pytest.mark.ranks(4)
def test_fully_sharded_models_load_and_save(tmp_path):
    mesh = init_device_mesh("cpu", (4,))
    for family in ("tied llama", "mixtral"):
        model, path = build(family), tmp_path / family
        with first_rank() as first:
            if first:
                model.save_pretrained(path / "theirs", max_shard_size="20KB")
        sharded = build(family, seed=1)
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        par_checkpoint.load(path / "theirs", model=sharded)
        for name, parameter in sharded.named_parameters():
            assert torch.equal(parameter.full_tensor(), model.get_parameter(name)), name
        par_checkpoint.save(
            path / "ours", model=sharded, format=par_checkpoint.Format(max_shard_size="20KB", config=model.config)
        )
        assert_same_files(path / "ours", path / "theirs")
        with first_rank() as first:
            if first:
                assert_same_state(opened(path / "ours", type(model)), model)


@pytest.mark.ranks(2)
def test_experts_that_are_dealt_out_over_ranks(tmp_path):
    """The model of each rank has half of the experts; `layout` says which."""
    rank = dist.get_rank()
    model, local = build("mixtral"), build("mixtral", seed=1)
    with first_rank() as first:
        if first:
            model.save_pretrained(tmp_path / "theirs")
            safetensors.save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    layout = {}
    for name, parameter in local.named_parameters():
        if ".experts." in name:
            layout[name] = cut(parameter.shape, 0, rank, 2, (rank,))
            parameter.data = share_of(parameter.data, layout[name])
    for path in (tmp_path / "theirs", tmp_path):  # expert by expert, and packed
        par_checkpoint.load(path, model=local, format=par_checkpoint.Format(layout=layout))
        for name, parameter in local.named_parameters():
            expected = model.get_parameter(name)
            assert torch.equal(parameter, share_of(expected, layout[name]) if name in layout else expected), name
            parameter.data.zero_()
    par_checkpoint.load(tmp_path / "theirs", model=local, format=par_checkpoint.Format(layout=layout))
    par_checkpoint.save(
        tmp_path / "ours",
        model=local,
        format=par_checkpoint.Format(max_shard_size="20KB", layout=layout, config=model.config),
    )
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
