"""LoRA adapters of peft under a strategy: made from a folder, trained, resumed and written as on one device."""

import copy
import functools
import gc
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from par_groups import part_of
from par_testing import storm
from par_train import Strategy
from par_train.strategy.pretrained.files import guard_saves_
from par_zero import summon

from . import tiny_llama
from .tiny_llama import WORDS

transformers = pytest.importorskip("transformers", minversion="5.4")
peft = pytest.importorskip("peft", minversion="0.21")

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # peft asks by the older name

STEPS = 2
TOLERANCE = 2e-5  # relative, fp32: sums over ranks and microbatches in another order
TEXT = {**tiny_llama.TEXT, "num_hidden_layers": 2}
CUT = {"size": 2, "mode": "1d"}
SEQUENCE = {**CUT, "sequence_parallel": True}


def write_base(folder, family="Llama", **options):
    """A folder of a model, which rank 0 writes."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**TEXT, **options})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()


def lora(**options):
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": targets, **options})


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, WORDS, (8, 12), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def train_plainly(model):
    """Losses of some steps of a model of peft, without a strategy."""
    losses = []
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.3, momentum=0.9)
    for batch in batches():
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@functools.cache
def one_device(base, adapter):
    """Losses, adapters and merged weights after some steps, in plain peft, from what a strategy has drawn."""
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True
    )
    losses = train_plainly(model)
    adapters = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    return losses, adapters, model.merge_and_unload().state_dict()


def made(strategy, base, adapter):
    model = strategy.from_pretrained(base, adapter=adapter)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return strategy.initialize(model, torch.optim.SGD(trained, lr=0.3, momentum=0.9))


def train(strategy, model, optimizer, first=0, stop=STEPS, adapters=("lora_",)):
    replica, replicas = strategy.groups.rank("data"), strategy.groups.size("data")
    rows = slice(replica * 8 // replicas, (replica + 1) * 8 // replicas)
    model.train()
    losses = []
    for batch in list(batches())[first:stop]:
        part = {key: value[rows] for key, value in batch.items()}
        loss = strategy.execute_pipeline(iter([part]), model, None, optimizer)
        dist.all_reduce(loss, group=strategy.groups["data"])
        losses.append(loss.item() / replicas)
        optimizer.step()
        changed = [name for name, each in model.named_parameters() if each.grad is not None]
        assert all(any(kind in name for kind in adapters) for name in changed)
        optimizer.zero_grad()
    return losses


def saved_adapters(folder, base):
    """What PeftModel opens, and what it finds there."""
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), folder)
    return peft.get_peft_model_state_dict(model)


def opened(folder):
    """What transformers opens, to which nothing is missing."""
    model, problems = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(problems.values())
    return model


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


CASES = {
    "data": {"zero": 2},
    "sequence x data, stage 3": {"parallel": {"tensor": SEQUENCE}, "zero": 3},
    "pipeline x tensor": {"parallel": {"pipeline": 2, "tensor": CUT}, "pipeline": {"microbatches": 2}},
}


@pytest.mark.ranks(4, timeout=240)
def test_adapters_are_drawn_trained_resumed_and_written_as_on_one_device(tmp_path):
    write_base(tmp_path / "base")
    base, drawn = tmp_path / "base", None
    for name, options in CASES.items():
        folder = tmp_path / name
        with Strategy(**options, seed=3) as strategy:
            model, optimizer = made(strategy, base, lora())
            strategy.save(model, folder / "drawn", plan="peft")
            losses = [] if name == "pipeline x tensor" else train(strategy, model, optimizer, stop=1)
            if losses:
                strategy.checkpoint(folder / "run", step=1)
            else:
                assert strategy.resume(tmp_path / "sequence x data, stage 3" / "run") == 1
            losses += train(strategy, model, optimizer, first=1)
            before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
            strategy.save(model, folder / "adapters", plan="peft")
            strategy.save(model, folder / "merged", plan="merged")
            assert all(torch.equal(part_of(before[key]), part_of(tensor)) for key, tensor in model.state_dict().items())
            if dist.get_rank() > 0:
                continue  # the files are the same for all
            start = safetensors.torch.load_file(folder / "drawn" / "adapter_model.safetensors")
            drawn = start if drawn is None else drawn
            assert all(torch.equal(start[key], tensor) for key, tensor in drawn.items()), name
            expected, adapters, merged = one_device(base, tmp_path / "data" / "drawn")
            assert losses == pytest.approx(expected[-len(losses) :], rel=TOLERANCE), name
            assert_near(saved_adapters(folder / "adapters", base), adapters)
            assert_near(opened(folder / "merged").state_dict(), merged)
            assert any(tensor.abs().sum() > 0 for key, tensor in start.items() if "lora_A" in key)
            assert all(tensor.abs().sum() == 0 for key, tensor in start.items() if "lora_B" in key)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("family", [storm("GPT2"), "Mixtral"])
def test_an_adapter_of_peft_is_trained_on_and_merged(tmp_path, family):
    """Linears that lie the other way round; experts that lie otherwise in files than in memory."""
    options = {"GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "Mixtral": {"num_local_experts": 4}}
    targets = {"GPT2": ["c_attn", "c_proj"], "Mixtral": ["q_proj", "o_proj"]}
    write_base(tmp_path / "base", family, **options[family])
    theirs = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        lora(target_modules=targets[family], fan_in_fan_out=family == "GPT2"),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
    if dist.get_rank() == 0:
        theirs.save_pretrained(tmp_path / "theirs")
        copy.deepcopy(theirs).bfloat16().save_pretrained(tmp_path / "half")
    dist.barrier()
    expected = peft.get_peft_model_state_dict(theirs)
    with Strategy(parallel={"tensor": CUT}) as strategy:
        model = strategy.initialize(strategy.from_pretrained(tmp_path / "base", adapter=tmp_path / "theirs"))
        batch = next(batches())
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, theirs(**batch).logits, rtol=1e-4, atol=TOLERANCE)
        assert any(parameter.requires_grad for parameter in model.parameters())
        strategy.save(model, tmp_path / "again", plan="peft")
        again = saved_adapters(tmp_path / "again", tmp_path / "base")
        assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
        strategy.load(model, tmp_path / "half", plan="peft")
        strategy.save(model, tmp_path / "again", plan="peft")
        again = saved_adapters(tmp_path / "again", tmp_path / "base")
        assert all(torch.equal(again[name], tensor.bfloat16().float()) for name, tensor in expected.items())
        strategy.load(model, tmp_path / "theirs", plan="peft")
        strategy.save(model, tmp_path / "merged", plan="merged")
        assert_near(opened(tmp_path / "merged").state_dict(), theirs.merge_and_unload().state_dict())


DORA = {
    "stage 3": {"zero": 3},
    "sequence": {"parallel": {"tensor": SEQUENCE}},
    "pipeline": {"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 2}},
}


@pytest.mark.ranks(2, timeout=240)
def test_dora_is_drawn_trained_and_written_as_on_one_device(tmp_path):
    write_base(tmp_path / "base")
    for name, options in DORA.items():
        folder = tmp_path / name
        with Strategy(**options, seed=3) as strategy:
            model, optimizer = made(strategy, tmp_path / "base", lora(use_dora=True))
            strategy.save(model, folder / "drawn", plan="peft")
            losses = train(strategy, model, optimizer)
            strategy.save(model, folder / "adapters", plan="peft")
            with pytest.raises(ValueError, match="the adapters are DoRA, which scales each full row of a weight"):
                strategy.save(model, folder / "merged", plan="merged")
            if dist.get_rank() == 0:
                expected, adapters, _ = one_device(tmp_path / "base", folder / "drawn")
                assert losses == pytest.approx(expected, rel=TOLERANCE), name
                assert_near(saved_adapters(folder / "adapters", tmp_path / "base"), adapters)
                assert sum("lora_magnitude_vector" in key for key in adapters) == 8
            dist.barrier()


@pytest.mark.ranks(2, timeout=240)
def test_adapters_of_packed_experts_train_as_on_one_device(tmp_path):
    base = tmp_path / "base"
    write_base(base, "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    config = lora(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    if dist.get_rank() == 0:
        torch.manual_seed(5)
        drawn = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
        drawn.save_pretrained(tmp_path / "drawn")
    dist.barrier()
    for name, options in {"stage 1": {"zero": 1}, "stage 3": {"zero": 3}}.items():
        with Strategy(**options, seed=3) as strategy:
            bare = transformers.AutoModelForCausalLM.from_pretrained(base)
            model = peft.PeftModel.from_pretrained(bare, tmp_path / "drawn", is_trainable=True)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            model, optimizer = strategy.initialize(model, torch.optim.SGD(trained, lr=0.3, momentum=0.9))
            losses = train(strategy, model, optimizer)
            strategy.save(model, tmp_path / name, plan="peft")
            with pytest.raises(ValueError, match=r"experts.* is around a bare parameter, which no rank merges"):
                strategy.save(model, tmp_path / "merged", plan="merged")
            if dist.get_rank() == 0:
                expected, adapters, _ = one_device(base, tmp_path / "drawn")
                assert losses == pytest.approx(expected, rel=TOLERANCE), name
                assert_near(saved_adapters(tmp_path / name, base), adapters)
                assert sum("experts" in key for key in adapters) == 8
            dist.barrier()
    with Strategy(seed=3) as strategy:  # files have each expert apart
        ids = torch.arange(12)[None]
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits
        model = strategy.from_pretrained(base, adapter=config)
        assert (model(input_ids=ids).logits - plain).abs().max() < 1e-5  # fp32; B is zero at first
    with (
        Strategy(parallel={"tensor": CUT}) as strategy,
        pytest.raises(TypeError, match=r"mlp\.experts' has an adapter \(ParamWrapper\) on .* experts"),
    ):
        strategy.from_pretrained(base, adapter=config)


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")  # their layers have no bias to merge it into
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 8 LoRA tensor")  # peft takes biases for shards
@pytest.mark.ranks(2, timeout=120)
def test_what_peft_trains_is_saved_or_refused(tmp_path):
    def adapted(config, **options):
        torch.manual_seed(0)
        return peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **options)), config)

    def initialized(strategy, model):
        trained = [each for each in model.parameters() if each.requires_grad]
        return strategy.initialize(model, torch.optim.SGD(trained, lr=0.3, momentum=0.9))

    reference, losses = adapted(lora(lora_bias=True)), []
    optimizer = torch.optim.SGD([each for each in reference.parameters() if each.requires_grad], lr=0.3, momentum=0.9)
    for batch in batches():
        losses.append(reference.train()(**batch).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    with Strategy(parallel={"tensor": CUT}, seed=3) as strategy:
        model, optimizer = initialized(strategy, adapted(lora(lora_bias=True)))
        assert train(strategy, model, optimizer) == pytest.approx([each.item() for each in losses], rel=TOLERANCE)
        strategy.save(model, tmp_path / "bias", plan="peft")
        with pytest.raises(ValueError, match="the adapters have lora_bias=True, and a bias of B is no part"):
            strategy.save(model, tmp_path / "merged", plan="merged")
        if dist.get_rank() == 0:
            saved = safetensors.torch.load_file(tmp_path / "bias" / "adapter_model.safetensors")
            assert_near(saved, peft.get_peft_model_state_dict(reference))
            assert any(key.endswith("lora_B.bias") for key in saved)
    with Strategy(parallel={"tensor": CUT}, seed=3) as strategy:
        model, _ = initialized(strategy, adapted(lora(bias="all"), attention_bias=True))
        for call in (
            lambda: strategy.save(model, tmp_path / "no", plan="peft"),
            lambda: strategy.checkpoints(tmp_path / "no", plan="peft").save(1),
        ):
            with pytest.raises(ValueError, match=r"8 other parameters are trained, such as .*q_proj.*bias'; freeze"):
                call()
        assert not (tmp_path / "no").exists()
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    whole, ids = adapted(prompts), next(batches())["input_ids"]
    whole(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(whole.prompt_encoder.parameters(), lr=0.3).step()
    with Strategy(parallel={"tensor": CUT}, seed=3) as strategy:
        model, optimizer = initialized(strategy, adapted(prompts))
        strategy.backward(model(input_ids=ids, labels=ids).loss, optimizer)
        optimizer.step()
        for found, expected in zip(model.prompt_encoder.parameters(), whole.prompt_encoder.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, timeout=240)
def test_modules_trained_in_full_are_saved_as_peft_saves_them(tmp_path):
    write_base(tmp_path / "base", num_hidden_layers=1)

    def adapted():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return peft.get_peft_model(model, lora(modules_to_save=["norm", "lm_head"]))

    reference = adapted()
    expected = train_plainly(reference)
    for name, options in {"stage 1": {"zero": 1}, "stage 3": {"zero": 3}}.items():
        with Strategy(**options, seed=3) as strategy:
            model = adapted()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            model, optimizer = strategy.initialize(model, torch.optim.SGD(trained, lr=0.3, momentum=0.9))
            losses = train(strategy, model, optimizer, adapters=("lora_", "modules_to_save"))
            assert losses == pytest.approx(expected, rel=TOLERANCE), name
            strategy.save(model, tmp_path / name, plan="peft")
            with pytest.raises(ValueError, match=r"norm.* is trained in full next to the adapters \(modules_to_save\)"):
                strategy.save(model, tmp_path / "merged", plan="merged")
            strategy.checkpoints(tmp_path / f"{name} run", plan="peft").save(1)
            with torch.no_grad():
                drawn = adapted()
            again = strategy.initialize(drawn)
            strategy.load(again, tmp_path / name, plan="peft")
            ids = next(batches())["input_ids"]
            with torch.no_grad():
                torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits)
        if dist.get_rank() == 0:
            files = safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors")
            assert_near(files, peft.get_peft_model_state_dict(reference))
            assert sum("lora_" not in key for key in files) == 4  # three norms and the head
            assert_near(saved_adapters(tmp_path / name, tmp_path / "base"), peft.get_peft_model_state_dict(reference))
        dist.barrier()


def test_guard_of_saves_keeps_no_model_alive():
    class Saved(torch.nn.Linear):
        def save_pretrained(self, folder, **keywords):
            del keywords
            return folder

    model = Saved(2, 2)
    guard_saves_(model)
    assert model.save_pretrained("here") == "here"
    kept = weakref.ref(model)
    gc.disable()  # a reference cycle stays until a collection
    try:
        del model
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.ranks(2, timeout=120)
def test_save_pretrained_of_freed_parameters_is_refused(tmp_path):
    write_base(tmp_path / "base", num_hidden_layers=1)
    folder = tmp_path / f"rank {dist.get_rank()}"
    with Strategy(zero=3, seed=3) as strategy:
        model, _ = made(strategy, tmp_path / "base", lora())
        bare = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        wrapped = strategy.initialize(peft.get_peft_model(bare, lora(modules_to_save=["lm_head"])))
        plain = strategy.initialize(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
        for sharded, call in (
            (model, r"save\(model, path, plan='peft'\)"),
            (wrapped, r"save\(model, path, plan='peft'\)"),
            (wrapped.get_base_model(), r"save\(model, path, plan='peft'\)"),
            (plain, r"save\(model, path\)"),
        ):
            with pytest.raises(RuntimeError, match=f"save_pretrained needs full parameters, and ZeRO 3 .*{call}, or"):
                sharded.save_pretrained(folder)
            with pytest.raises(RuntimeError, match=r"is pickled or saved outside of summon"):
                torch.save(sharded.state_dict(), tmp_path / "state")
        assert not folder.exists()
        for number, sharded in enumerate((wrapped, plain)):
            with summon(sharded):
                sharded.save_pretrained(folder / str(number))
                state = {name: tensor.clone() for name, tensor in sharded.state_dict().items()}
            sharded.save_pretrained(folder / f"state {number}", state_dict=state)
        plain.save_pretrained(folder / "state position", True, state)
        strategy.save(wrapped, tmp_path / "ours", plan="peft")
    if dist.get_rank() == 0:  # transformers writes on this rank only
        for written, name in (("state 0", "0/adapter_model"), ("state 1", "1/model"), ("state position", "1/model")):
            other = folder / written / Path(name).name
            one, other = (safetensors.torch.load_file(f"{each}.safetensors") for each in (folder / name, other))
            assert_near(one, other)
        found, expected = (saved_adapters(part, tmp_path / "base") for part in (folder / "0", tmp_path / "ours"))
        assert_near(found, expected)
        assert_near(opened(folder / "1").state_dict(), opened(tmp_path / "base").state_dict())


@pytest.mark.ranks(2, timeout=120)
def test_what_is_no_plain_lora_is_refused_by_name(tmp_path):
    write_base(tmp_path / "base", num_hidden_layers=1)
    ia3 = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with Strategy() as strategy:
        for error, message, adapter in (
            (ValueError, r"adapter has modules_to_save=\['norm'\]", lora(modules_to_save=["norm"])),
            (ValueError, "adapter has bias='all', which trains biases", lora(bias="all")),
            (ValueError, "init_lora_weights='pissa', which looks at whole weights", lora(init_lora_weights="pissa")),
            (TypeError, "adapter is a IA3Config; give a LoraConfig", ia3),
            (TypeError, "adapter is a int; give a LoraConfig", 8),
            (TypeError, "is around the output embedding", lora(target_modules=["lm_head"])),
            (TypeError, "is no LoRA around a linear", lora(target_modules=["embed_tokens"])),
            (ValueError, r"holds no adapter_config\.json", tmp_path / "base"),
        ):
            with pytest.raises(error, match=message):
                strategy.from_pretrained(tmp_path / "base", adapter=adapter)
        plain = strategy.initialize(strategy.from_pretrained(tmp_path / "base"))
        for plan in ("peft", "merged"):
            with pytest.raises(ValueError, match=f"plan='{plan}': this LlamaForCausalLM has no adapters"):
                strategy.save(plain, tmp_path / "out", plan=plan)
        with pytest.raises(ValueError, match="plan='pickle': it must be one of huggingface, torch, peft, merged"):
            strategy.save(plain, tmp_path / "out", plan="pickle")
        config = transformers.LlamaConfig(**TEXT)
        write_base(tmp_path / "less", num_hidden_layers=1)
        if dist.get_rank() == 0:
            config.save_pretrained(tmp_path / "less")
        dist.barrier()
        with pytest.raises(ValueError, match=r"less' does not fit its config: missing: model\.layers\.1\."):
            strategy.from_pretrained(tmp_path / "less", adapter=lora())
        if dist.get_rank() == 0:
            quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
            transformers.LlamaConfig(**TEXT, quantization_config=quantized).save_pretrained(tmp_path / "nf4")
        dist.barrier()
        with pytest.raises(
            ValueError, match=r"nf4' holds weights quantized by bitsandbytes, which are not sharded; for"
        ):
            strategy.from_pretrained(tmp_path / "nf4", adapter=lora())
        adapted = strategy.initialize(strategy.from_pretrained(tmp_path / "base", adapter=lora()))
        with pytest.raises(ValueError, match="has adapters, for which transformers' folders have no place"):
            strategy.save(adapted, tmp_path / "out")


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=180)
def test_weights_are_drawn_alike_under_every_topology(tmp_path):
    cases = {"data": {}, "sequence, stage 3": {"parallel": {"tensor": SEQUENCE}, "zero": 3}}
    cases["pipeline x tensor"] = {"parallel": {"pipeline": 2, "tensor": CUT}, "pipeline": {"microbatches": 2}}
    families = {
        "Llama": {"tie_word_embeddings": True, "initializer_range": 0.1, "attention_bias": True},
        "Mixtral": {"num_local_experts": 4},
        "GPT2": {"initializer_range": 0.1},
    }
    drawn = {}
    for family, options in families.items():
        if dist.get_rank() == 0:
            getattr(transformers, f"{family}Config")(
                **{**TEXT, **options}, architectures=[f"{family}ForCausalLM"]
            ).save_pretrained(tmp_path / family)
    dist.barrier()
    for name, options in cases.items():
        with Strategy(**options, seed=7) as strategy:
            for family in families:
                if family == "GPT2" and strategy.schedule is not None:
                    continue  # which does not say where it may be cut
                before = torch.get_rng_state()
                model = strategy.from_pretrained(tmp_path / family, weights=False)
                assert torch.equal(torch.get_rng_state(), before)
                strategy.save(strategy.initialize(model), tmp_path / name / family)
                with torch.no_grad():
                    logits = None if strategy.schedule else model.eval()(**next(batches())).logits
                if dist.get_rank() > 0:
                    continue  # the files are the same for all
                whole = opened(tmp_path / name / family)
                found = whole.state_dict()
                expected = drawn.setdefault(family, found)
                assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), (name, family)
                if logits is not None:
                    torch.testing.assert_close(logits, whole(**next(batches())).logits, rtol=1e-4, atol=TOLERANCE)
    if dist.get_rank() > 0:
        return
    llama, gpt2 = drawn["Llama"], drawn["GPT2"]
    assert llama["model.layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert not torch.equal(
        llama["model.layers.0.self_attn.q_proj.weight"], llama["model.layers.1.self_attn.q_proj.weight"]
    )
    assert torch.equal(llama["model.norm.weight"], torch.ones(32))
    assert torch.equal(llama["model.layers.1.self_attn.q_proj.bias"], torch.zeros(32))
    name = "transformer.h.0.mlp.c_proj.weight"  # which newer releases draw smaller, from the module around it
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**TEXT, **families["GPT2"]})).state_dict()
    assert gpt2[name].std().item() == pytest.approx(theirs[name].std().item(), rel=0.1)


@pytest.mark.ranks(2, timeout=120)
def test_adapters_and_drawn_weights_go_together(tmp_path):
    if dist.get_rank() == 0:
        transformers.LlamaConfig(**TEXT).save_pretrained(tmp_path)
    dist.barrier()
    with Strategy(parallel={"tensor": CUT}) as strategy:
        plain = strategy.initialize(strategy.from_pretrained(tmp_path, weights=False))
        adapted = strategy.initialize(strategy.from_pretrained(tmp_path, weights=False, adapter=lora()))
        ids = next(batches())["input_ids"]
        assert torch.equal(adapted(input_ids=ids).logits, plain(input_ids=ids).logits), "B is zero"
        prompt = ids[:2, :4]
        assert torch.equal(strategy.sample(adapted, prompt, 3), strategy.sample(plain, prompt, 3))
