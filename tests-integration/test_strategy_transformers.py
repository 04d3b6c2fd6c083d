"""Models of transformers, unchanged, under a strategy: losses and weights of one device, however they are cut."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from par_layers import sync_aux_loss_
from par_layers.pretrained import causal_lm_loss
from par_testing import once
from par_train import Strategy

from .tiny_llama import TEXT, WORDS

transformers = pytest.importorskip("transformers")
for _family in ("Llama", "Mixtral", "Qwen3Moe"):  # imported here once, and not by each rank of each test
    getattr(transformers, f"{_family}ForCausalLM")

STEPS = 2  # the second step's weights show momentum
TOLERANCE = 2e-5  # relative, fp32: sums over ranks and microbatches in another order


def make_model(family="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TEXT, **options})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def batches(ignored=True):
    """Dicts, as a collator gives them: another number of tokens counts in every row, unless none are ignored."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, WORDS, (8, 12), generator=generator)
        labels = ids.clone()
        for row in range(8 if ignored else 0):
            labels[row, : row + 1] = -100
        yield {"input_ids": ids, "labels": labels}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.01)


@functools.cache
def one_device(family="Llama", parts=1, ignored=True, make=sgd, **options):
    """Losses and weights after some steps, in plain torch; each batch in one part, or in several, one after another."""
    model = make_model(family, **dict(options)).train()
    optimizer = make(model.parameters())
    losses = []
    for batch in batches(ignored):
        every = int((batch["labels"][:, 1:] != -100).sum())
        losses.append(0.0)
        for rows in torch.arange(8).chunk(parts):
            part = {key: value[rows] for key, value in batch.items()}
            loss = model(**part).loss * ((part["labels"][:, 1:] != -100).sum() / every)
            loss.backward()
            losses[-1] += loss.item()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def losses_alone(family="Llama", **options):
    return one_device(family, **options)[0]


def train(strategy, model, over="data", ignored=True, make=sgd):
    """The same steps, under a strategy; rows are shared out over the ranks that see others."""
    optimizer = make(model.parameters())
    model, optimizer = strategy.initialize(model, optimizer)
    model.train()
    replica, replicas = strategy.groups.rank(over), strategy.groups.size(over)
    rows = 8 // replicas
    losses = []
    for batch in batches(ignored):
        part = {key: value[replica * rows : (replica + 1) * rows] for key, value in batch.items()}
        loss = strategy.execute_pipeline(iter([part]), model, None, optimizer)
        tokens = (part["labels"][:, 1:] != -100).sum()
        summed = torch.stack([loss * tokens, tokens.double()])
        torch.distributed.all_reduce(summed, group=strategy.groups[over])
        losses.append((summed[0] / summed[1]).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def assert_as_on_one_device(strategy, model, losses, folder, family="Llama", **options):
    assert losses == pytest.approx(once(losses_alone, family, **options), rel=TOLERANCE)
    strategy.save(model, folder)
    if torch.distributed.get_rank() > 0:
        return  # the files are the same for all
    _, weights = one_device(family, **options)
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(
            saved[name], tensor, rtol=1e-4, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


CASES_2 = {
    "tensor": {"parallel": {"tensor": {"size": 2, "mode": "1d"}}},
    "sequence": {"parallel": {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, "zero": 1},
    "pipeline": {"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 4}},
    "zero bubble": {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_h1", "microbatches": 4}},
    "data, stage 3": {"zero": 3},
}


EITHER = pytest.mark.parametrize(
    "first", [False, pytest.param(True, marks=pytest.mark.storm)], ids=["every other is tied", "the others"]
)


@EITHER
@pytest.mark.ranks(2, timeout=120)
def test_two_ranks(tmp_path, first):
    for number, (name, options) in enumerate(CASES_2.items()):
        tied = (number % 2 == 0) == first
        with Strategy(**options, clip_norm=1.0) as strategy:
            model, losses = train(strategy, make_model(tie_word_embeddings=tied))
            assert_as_on_one_device(strategy, model, losses, tmp_path / name, tie_word_embeddings=tied)


ROUTED = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


ROUTERS_OVER = {"tensor": 1, "sequence": 1, "data, stage 3": 2}
"""The parts that one device takes, one after another."""


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("Mixtral", ["sequence", "data, stage 3"]),
        ("Qwen3Moe", ["tensor"]),
        *(pytest.param(family, list(ROUTERS_OVER), marks=pytest.mark.storm) for family in ROUTED),
    ],
    ids=["Mixtral", "Qwen3Moe", "Mixtral, all", "Qwen3Moe, all"],
)
def test_the_auxiliary_loss_of_routers_counts_as_on_one_device(tmp_path, family, names):
    """Over data ranks it is that of each rank's tokens, as on one device that takes the parts one after another."""
    options = {**ROUTED[family], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    without = once(losses_alone, family, **{**options, "router_aux_loss_coef": 0.0})
    for name in names:
        parts = ROUTERS_OVER[name]
        with Strategy(**CASES_2[name], clip_norm=1.0) as strategy:
            model, losses = train(strategy, make_model(family, **options))
            assert losses[0] > without[0] + 0.1
            assert_as_on_one_device(strategy, model, losses, tmp_path / name, family, parts=parts, **options)


@pytest.mark.ranks(2, timeout=120)
def test_the_auxiliary_loss_may_be_that_of_all_ranks_tokens_at_once(tmp_path):
    """As on one device that takes the whole batch in one forward; ranks have as many targets for each token."""
    options = {**ROUTED["Mixtral"], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    with Strategy(parallel={"expert": 2}, zero=1, clip_norm=1.0) as strategy:
        model = sync_aux_loss_(make_model("Mixtral", **options), strategy.groups)
        model, losses = train(strategy, model, over=("data", "sequence", "expert"), ignored=False)
        assert_as_on_one_device(strategy, model, losses, tmp_path / "saved", "Mixtral", ignored=False, **options)


@pytest.mark.ranks(2, timeout=120)
def test_state_that_an_optimizer_has_made_before_its_first_step_is_cut_with_its_parameters(tmp_path):
    for name, stage in (("tensor", 0), ("tensor", 3), ("pipeline", 1), ("pipeline", 2)):
        with Strategy(**CASES_2[name], zero=stage, clip_norm=1.0) as strategy:
            model, losses = train(strategy, make_model(tie_word_embeddings=True), make=adagrad)
            saved = tmp_path / f"{name} {stage}"
            assert_as_on_one_device(strategy, model, losses, saved, make=adagrad, tie_word_embeddings=True)


CUT = {"size": 2, "mode": "1d"}
CASES_4 = {
    "pipeline x tensor, stage 1": {
        "parallel": {"pipeline": 2, "tensor": CUT},
        "pipeline": {"microbatches": 4},
        "zero": 1,
    },
    "pipeline x sequence parallel": {
        "parallel": {"pipeline": 2, "tensor": {**CUT, "sequence_parallel": True}},
        "pipeline": {"microbatches": 2},
    },
    "two stages a rank, twice": {
        "parallel": {"pipeline": 2, "data": 2},
        "pipeline": {"schedule": "interleaved", "microbatches": 4},
    },
    "tensor, stage 3": {"parallel": {"tensor": CUT}, "zero": 3},
}


@pytest.mark.storm
@EITHER
@pytest.mark.ranks(4, timeout=180)
def test_four_ranks(tmp_path, first):
    for number, (name, options) in enumerate(CASES_4.items()):
        tied = (number % 2 == 0) != first
        with Strategy(**options, clip_norm=1.0) as strategy:
            model, losses = train(strategy, make_model(tie_word_embeddings=tied))
            assert_as_on_one_device(strategy, model, losses, tmp_path / name, tie_word_embeddings=tied)


@pytest.mark.ranks(4, timeout=120)
def test_experts_are_dealt_out_under_a_schedule_that_takes_their_weight_gradients_later(tmp_path):
    parallel, pipeline = {"pipeline": 2, "expert": 2}, {"schedule": "zb_h1", "microbatches": 2}
    with Strategy(parallel=parallel, pipeline=pipeline, zero=1, clip_norm=1.0) as strategy:
        model = make_model("Mixtral", **ROUTED["Mixtral"])
        model, losses = train(strategy, model, over=("data", "sequence", "expert"))
        assert_as_on_one_device(strategy, model, losses, tmp_path / "saved", "Mixtral", **ROUTED["Mixtral"])


@pytest.mark.ranks(4, timeout=120)
def test_folder_is_read_into_stages_of_cut_layers(tmp_path):
    if torch.distributed.get_rank() == 0:
        make_model(tie_word_embeddings=False).save_pretrained(tmp_path / "given")
        make_model(tie_word_embeddings=False).bfloat16().save_pretrained(tmp_path / "half")
    torch.distributed.barrier()
    parallel = {"pipeline": 2, "tensor": {**CUT, "sequence_parallel": True}}
    with Strategy(parallel=parallel, pipeline={"microbatches": 2}, zero=1, clip_norm=1.0) as strategy:
        halves = strategy.from_pretrained(tmp_path / "half", dtype=torch.float32).state_dict()
        model = strategy.from_pretrained(tmp_path / "given")
        for name, tensor in model.state_dict().items():
            assert torch.equal(halves[name], tensor.bfloat16().float()), name
        whole = sum(parameter.numel() for parameter in make_model(tie_word_embeddings=False).parameters())
        assert sum(parameter.numel() for parameter in model.parameters()) < 0.3 * whole
        model, losses = train(strategy, model)
        assert_as_on_one_device(strategy, model, losses, tmp_path / "saved", tie_word_embeddings=False)


@pytest.mark.ranks(2, timeout=120)
def test_bf16_leaves_rotary_frequencies_as_they_are():
    with Strategy(parallel={"tensor": CUT}, precision="bf16", clip_norm=1.0) as strategy:
        model, losses = train(strategy, make_model())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert torch.equal(model.model.rotary_emb.inv_freq, make_model().model.rotary_emb.inv_freq)
        assert losses == pytest.approx(once(losses_alone), rel=2e-2)  # bf16 has 8 bits


@pytest.mark.ranks(2, timeout=120)
def test_what_cannot_be_right_is_refused_on_every_rank(tmp_path):
    with Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}) as strategy:
        model = make_model()
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = next(batches())
        mask, positions = torch.ones_like(batch["input_ids"]), torch.arange(12).expand(8, 12)
        packed = {**batch, "attention_mask": mask, "position_ids": positions}
        with pytest.raises(ValueError, match="remove attention_mask for packed rows"):
            strategy.execute_pipeline(iter([packed]), model, None, optimizer)
        strategy.pipeline(model).reset()
        with pytest.raises(ValueError, match=r"\['labels'\], but no tensor `input_ids`"):
            strategy.execute_pipeline(iter([{"labels": batch["labels"]}]), model, None, optimizer)
        with pytest.raises(ValueError, match=r"has no config\.json; pass the folder of a model"):
            strategy.from_pretrained(tmp_path)
    with Strategy(parallel={"pipeline": 2}) as strategy:
        uncut = transformers.MambaForCausalLM(
            transformers.MambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=WORDS)
        )
        with pytest.raises(TypeError, match="MambaForCausalLM has no complete _pp_plan, and its layers 'backbone"):
            strategy.initialize(uncut)
        routed = make_model("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
        with pytest.raises(ValueError, match="adds a loss of the routers of all layers"):
            strategy.initialize(routed)


class WithAuxiliary(transformers.LlamaForCausalLM):
    """A model whose own loss is more than the causal one."""

    def forward(self, *inputs, **keywords):
        outputs = super().forward(*inputs, **keywords)
        outputs.loss = outputs.logits.square().mean()
        return outputs


class Holder(nn.Module):
    """A module that holds a causal model."""

    def __init__(self, language):
        super().__init__()
        self.language = language

    def forward(self, *inputs, **keywords):
        return self.language(*inputs, **keywords)


SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 5}
OTHER_LOSSES = {
    "LlamaForTokenClassification": "computes ForTokenClassification",
    "LlamaForSequenceClassification": "computes ForSequenceClassificationLoss",
    "BertForMaskedLM": "BertForMaskedLM computes its own loss",
    "BertForMultipleChoice": "BertForMultipleChoice computes its own loss",
    "LlamaModel": "LlamaModel computes its own loss",
}


def model_of(kind):
    family = "Bert" if kind.startswith("Bert") else "Llama"
    more = {"intermediate_size": 32, "pad_token_id": 0}
    return getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**SMALL, **more))


def test_loss_that_is_not_causal_is_refused():
    batch = {"input_ids": torch.ones(4, 6, dtype=torch.int64), "labels": torch.ones(4, 6, dtype=torch.int64)}
    language = make_model()
    language.loss_function = lambda *_, **__: torch.zeros(())
    models = {kind: model_of(kind) for kind in OTHER_LOSSES}
    models |= {
        "own loss_function": language,
        "subclass": WithAuxiliary(make_model().config),
        "Holder": Holder(make_model()),
        "z-loss": transformers.BambaForCausalLM(
            transformers.BambaConfig(
                **SMALL, intermediate_size=32, num_key_value_heads=2, z_loss_coefficient=0.5, mamba_n_heads=4,
                mamba_d_head=8, mamba_d_state=4, attn_layer_indices=[1],
            )
        ),
    }  # fmt: skip
    rules = {
        **OTHER_LOSSES,
        "own loss_function": "computes <lambda>",
        "subclass": "WithAuxiliary computes its own loss",
        "Holder": "a Holder contains a LlamaForCausalLM and may compute its own loss",
        "z-loss": "adds 0.5 of a z-loss",
    }
    for name, model in models.items():
        with Strategy(pipeline={"microbatches": 2}) as strategy:
            given, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with pytest.raises(ValueError, match=f"criterion=None: .* {rules[name]}; pass a criterion"):
                strategy.execute_pipeline(iter([batch]), given, None, optimizer)


def test_criterion_trains_a_model_that_is_not_causal():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (6, 8), generator=generator)
    batch = {"input_ids": ids, "labels": torch.where(ids % 3 == 0, -100, ids % 5)}

    def criterion(outputs, target):
        labels = target["labels"]
        total = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total, (labels != -100).sum()

    torch.manual_seed(0)
    model = model_of("LlamaForTokenClassification").eval()  # without its dropout
    expected = model(**batch).loss
    right = torch.autograd.grad(expected, model.score.weight)[0]
    before = model.score.weight.detach().clone()
    with Strategy(pipeline={"microbatches": 3}) as strategy:
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        loss = strategy.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
        torch.testing.assert_close(before - model.score.weight.detach(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
def test_criterion_on_tensor_ranks_receives_full_logits():
    sizes = []

    def criterion(outputs, target):
        sizes.append(outputs.logits.shape[-1])
        return causal_lm_loss(outputs, target)

    with Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}) as strategy:
        model = make_model()
        model, optimizer = strategy.initialize(model, sgd(model.parameters()))
        batch = next(batches())
        loss = strategy.execute_pipeline(iter([batch]), model, criterion, optimizer)
        assert sizes == [WORDS]
        assert loss.item() == pytest.approx(losses_alone()[0], rel=TOLERANCE)
        own = model.train()(**batch)
        assert own.logits.argmax(-1).max() >= WORDS // 2  # of both ranks' shards of the vocabulary


def adapted():
    """A model with LoRA adapters, all of which are drawn."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    torch.manual_seed(2)
    model = peft.get_peft_model(make_model(), options)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 reads it
@pytest.mark.ranks(2, timeout=120)
def test_adapters_alone_are_trained(tmp_path):
    peft = pytest.importorskip("peft")
    whole = adapted().train()
    optimizer = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.5)
    expected = []
    for batch in batches():
        loss = whole(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert expected[-1] != expected[0]
    with Strategy(parallel={"tensor": CUT}) as strategy:
        model = adapted()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        model, optimizer = strategy.initialize(model, optimizer)
        losses = []
        for batch in batches():
            losses.append(strategy.execute_pipeline(iter([batch]), model, None, optimizer).item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert all(parameter.grad is None for name, parameter in model.named_parameters() if "lora_" not in name)
        strategy.save(model, tmp_path / "adapters", plan="peft")
        strategy.save(model, tmp_path / "merged", plan="merged")
    opened = peft.PeftModel.from_pretrained(make_model(), tmp_path / "adapters")
    found, wanted = peft.get_peft_model_state_dict(opened), peft.get_peft_model_state_dict(whole)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=TOLERANCE)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in whole.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=TOLERANCE)
    refusal = pytest.raises(
        ValueError, match=r"for a model with adapters, use Strategy\.from_pretrained\(adapter=\.\.\.\)"
    )
    with Strategy(parallel={"pipeline": 2}) as strategy, refusal:
        strategy.initialize(adapted())
