"""Models of transformers over a sequence that is cut: losses, norms and weights of one device, in every mode."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from par_train import Strategy

from .tiny_llama import TEXT, WORDS

transformers = pytest.importorskip("transformers", minversion="5.4")
for _family in ("Llama",):  # imported here once, and not by each rank of each test
    getattr(transformers, f"{_family}ForCausalLM")

STEPS, LENGTH = 2, 17  # the second step's weights show momentum
TOLERANCE = 2e-5  # relative, fp32: sums over ranks and microbatches in another order


def make_model(family="Llama", kind="", **options):
    torch.manual_seed(0)
    of_text = f"{family}TextConfig"  # of families that see images too
    config = getattr(transformers, of_text if hasattr(transformers, of_text) else f"{family}Config")(
        **{**TEXT, **options}
    )
    return getattr(transformers, kind or f"{family}ForCausalLM")(config)


def packed():
    """Rows of documents, as a collator gives them."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, WORDS, (4, LENGTH), generator=generator)
        labels, positions = ids.clone(), []
        for row, lengths in enumerate([[LENGTH], [5, 1, LENGTH - 6], [LENGTH - 2, 2], [7, LENGTH - 7]]):
            positions.append(torch.cat([torch.arange(length) for length in lengths]))
            labels[row, positions[-1] == 0] = -100
        yield {"input_ids": ids, "position_ids": torch.stack(positions), "labels": labels}


def one_device(family="Llama", batches=packed, **options):
    """Losses, norms and weights after some steps, in plain torch."""
    model = make_model(family, **dict(options)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, norms = [], []
    for batch in batches():
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(float(clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def train(strategy, model, batches=packed):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = strategy.initialize(model, optimizer)
    model.train()
    replica, replicas = strategy.groups.rank("data"), strategy.groups.size("data")
    rows = 4 // replicas
    losses, norms = [], []
    for batch in batches():
        mine = {key: value[replica * rows : (replica + 1) * rows] for key, value in batch.items()}
        loss, tokens = (
            strategy.execute_pipeline(iter([mine]), model, None, optimizer),
            (mine["labels"][:, 1:] != -100).sum(),
        )
        summed = torch.stack([loss * tokens, tokens.double()])
        torch.distributed.all_reduce(summed, group=strategy.groups["data"])
        losses.append((summed[0] / summed[1]).item())
        norms.append(float(optimizer.step().grad_norm))
        optimizer.zero_grad()
    return losses, norms, model


def sequence(mode, **options):
    return {"sequence": {"size": 2, "mode": mode, **options}}


def assert_as_on_one_device(strategy, found, expected, folder, name):
    losses, norms, model = found
    assert losses == pytest.approx(expected[0], rel=TOLERANCE), name
    assert norms == pytest.approx(expected[1], rel=TOLERANCE), name
    strategy.save(model, folder)
    if torch.distributed.get_rank() > 0:
        return  # the files are the same for all
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert saved.config._attn_implementation != "par_context"
    for key, tensor in saved.state_dict().items():
        torch.testing.assert_close(
            tensor, expected[2][key], rtol=1e-4, atol=TOLERANCE, msg=lambda text, key=key: f"{name}, {key}: {text}"
        )


CUT = {"size": 2, "mode": "1d"}
CASES_2 = {
    "gather": {"parallel": sequence("gather"), "pipeline": {"microbatches": 2}},
    "ring, stage 2": {"parallel": sequence("ring", split="zigzag"), "zero": 2},
    "ulysses, stage 3": {"parallel": sequence("ulysses"), "zero": 3},
}
CASES_4 = {
    "2d": {"parallel": {"sequence": {"size": 4, "mode": "2d", "ulysses": 2}}},
    "data, stage 1": {"parallel": {"data": 2, **sequence("ring")}, "zero": 1},
    "pipeline": {"parallel": {"pipeline": 2, **sequence("gather")}, "pipeline": {"microbatches": 2}},
    "tensor": {"parallel": {"tensor": CUT, **sequence("ulysses")}},
    "sequence parallel": {"parallel": {"tensor": {**CUT, "sequence_parallel": True}, **sequence("gather")}},
}


@pytest.mark.ranks(2, timeout=120)
def test_two_ranks(tmp_path):
    expected = one_device()
    for name, options in CASES_2.items():
        with Strategy(**options, clip_norm=1.0) as strategy:
            assert_as_on_one_device(strategy, train(strategy, make_model()), expected, tmp_path / name, name)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
def test_four_ranks(tmp_path):
    expected = one_device(tie_word_embeddings=True)
    for name, options in CASES_4.items():
        with Strategy(**options, clip_norm=1.0) as strategy:
            found = train(strategy, make_model(tie_word_embeddings=True))
            assert_as_on_one_device(strategy, found, expected, tmp_path / name, name)


WINDOW = {"sliding_window": 5, "head_dim": 8}
FAMILIES = {
    "Qwen3": {"head_dim": 8},
    "Mistral": WINDOW,
    "Gemma3": {**WINDOW, "kind": "Gemma3ForCausalLM", "layer_types": ["sliding_attention", "full_attention"] * 2},
    "GPT2": {"kind": "GPT2LMHeadModel", "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "n_inner": 48},
    "GptOss": {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    "Llama4": {"head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48},
}


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_families(tmp_path, family):
    """Windows, chunks, sinks, learned positions. On one device gpt-oss attends across the documents of a packed row."""
    options, batches = FAMILIES[family], padded if family == "GptOss" else packed
    expected = one_device(family, batches, **options)
    for name, case in CASES_2.items():
        with Strategy(**case, clip_norm=1.0) as strategy:
            found = train(strategy, make_model(family, **options), batches)
            assert_as_on_one_device(strategy, found, expected, tmp_path / name, f"{family}, {name}")


def padded():
    """Rows that end in padding, in batches of four; the last one is as long as its row."""
    for batch in packed():
        mask = torch.arange(LENGTH) < torch.tensor([[3], [LENGTH - 1], [10], [LENGTH]])
        ids = batch["input_ids"]
        yield {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


@pytest.mark.ranks(2)
def test_a_loop_of_ones_own_over_a_folder_and_padded_rows(tmp_path):
    """The loader that initialize gives cuts dicts; the model's own losses add up to the mean of the whole rows."""
    make_model().save_pretrained(tmp_path)
    whole = make_model().train()
    optimizer, expected = torch.optim.SGD(whole.parameters(), lr=0.5), []
    for batch in padded():
        loss = whole(**batch).loss
        loss.backward()
        expected.append((loss.item(), float(clip_grad_norm_(whole.parameters(), 1.0))))
        optimizer.step()
        optimizer.zero_grad()
    rows = [{key: value[row] for key, value in batch.items()} for batch in padded() for row in range(4)]
    with Strategy(parallel=sequence("ring"), zero=1, clip_norm=1.0) as strategy:
        model, found = strategy.from_pretrained(tmp_path).train(), []
        loader, optimizer = torch.utils.data.DataLoader(rows, batch_size=4), torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = strategy.initialize(model, optimizer, loader)
        for batch in loader:
            assert batch["input_ids"].shape == (4, 9), "17 tokens are filled up to 18"
            loss = strategy.context.sum(model(**batch).loss)
            strategy.backward(loss, optimizer)
            found.append((loss.item(), float(optimizer.step().grad_norm)))
            optimizer.zero_grad()
        with pytest.raises(ValueError, match=r"generate\(\) reads cached keys of earlier tokens"):
            model.generate(torch.ones(1, 3, dtype=torch.int64))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)


def adapted():
    """A model with LoRA adapters, all of which are drawn."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 reads it
@pytest.mark.ranks(2)
def test_adapters_alone_are_trained_where_one_rank_has_no_target():
    batch = next(packed())
    batch["labels"][:, :10] = -100  # rank 0 has tokens 0 to 8
    whole, optimizer = adapted()
    expected = []
    for _ in range(STEPS):
        loss = whole.train()(**batch, use_cache=False).loss
        loss.backward()
        expected.append((loss.item(), float(clip_grad_norm_(whole.parameters(), 1.0))))
        optimizer.step()
        optimizer.zero_grad()
    with Strategy(parallel=sequence("gather", split="contiguous"), zero=1, clip_norm=1.0) as strategy:
        model, optimizer = strategy.initialize(*adapted())
        for expectation in expected:
            batches = iter([transformers.BatchEncoding(batch)])  # a mapping that is no dict
            loss = float(strategy.execute_pipeline(batches, model.train(), None, optimizer))
            assert (loss, float(optimizer.step().grad_norm)) == pytest.approx(expectation, rel=TOLERANCE)
            optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_what_sequence_ranks_cannot_do_is_refused_on_all_of_them_before_anything_changes(tmp_path):
    make_model().save_pretrained(tmp_path)
    sgd = torch.optim.SGD
    with Strategy(parallel=sequence("ulysses")) as strategy:
        for model, words in (
            (make_model("Mamba", state_size=4), "takes no position_ids"),
            (make_model("T5", "T5ForConditionalGeneration", d_model=8, d_kv=4, d_ff=8), "has an encoder"),
            (make_model(num_attention_heads=1, num_key_value_heads=1), "heads 1 do not divide by 2 ranks of ulysses"),
            (
                make_model("Llama", "LlamaForTokenClassification", classifier_dropout=0.0),
                "sequence=2: split batches have labels of the next token, and LlamaForTokenClassification",
            ),
            (make_model(attention_dropout=0.1), r"has attention_dropout=0.1 in 'model\.layers\.0.*; set it to 0"),
        ):
            before = getattr(model.config, "_attn_implementation", None)
            with pytest.raises(ValueError, match=words):
                strategy.initialize(model, sgd(model.parameters(), lr=0.1))
            assert getattr(model.config, "_attn_implementation", None) == before
        with pytest.raises(ValueError, match=r"attention is 'eager', but over sequence=2 .* leave attention out"):
            strategy.from_pretrained(tmp_path, attention="eager")
        model = make_model()
        model, optimizer = strategy.initialize(model, sgd(model.parameters(), lr=0.1))
        batch = next(padded())
        for wrong, words in (
            ({**batch, "labels": batch["input_ids"]}, "tokens have labels, but attention_mask 0"),
            (
                {**batch, "attention_mask": batch["attention_mask"].flip(1), "labels": None},
                "padding at the right alone",
            ),
            ({**batch, "position_ids": torch.arange(LENGTH).expand(4, -1)}, "remove attention_mask for packed rows"),
            (
                {"input_ids": batch["input_ids"][:, strategy.groups.rank("sequence") :]},
                "rank 1 has other tokens than rank 0",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                strategy.execute_pipeline(iter([wrong]), model, None, optimizer)
            strategy.pipeline(model).reset()
