"""The job that trains a model of transformers: whole runs on ranks of a test, and through the command."""

import json
import math
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from par_train._errors import UserError
from par_train.jobs import hooks, job_run
from par_train.jobs.options import (
    AdapterOptions,
    DataOptions,
    ModelOptions,
    Options,
    SampleOptions,
    ScheduleOptions,
    TrainOptions,
)
from par_train.run.stop import Stop, StoppedEarly

transformers = pytest.importorskip("transformers")
FAMILY, TOKENIZER = transformers.LlamaForCausalLM, transformers.AutoTokenizer  # imported once, where ranks are forked

TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
SEQUENCE = {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}
TOLERANCE = 1e-4  # relative, fp32: sums in another order, which Adam enlarges where a gradient is next to nothing
RATE = {"learning_rate": 1e-3, "warmup_steps": 2}


class StopAt(Stop):
    """Is asked to leave by SIGTERM while its n-th step is taken."""

    def __init__(self, step):
        self.left = step

    @property
    def signal(self):
        if self.training:
            self.left -= 1
        return signal.SIGTERM if self.training and self.left <= 0 else 0


class StopInCorpus(Stop):
    """Rank 0, which reads the file, is asked to leave by SIGTERM before its tenth document."""

    def __init__(self):
        self.left = 10 if dist.get_rank() == 0 else math.inf

    @property
    def signal(self):
        self.left -= 1
        return signal.SIGTERM if self.left <= 0 else 0


def train(options, stop, *, draws=False):
    """As the command does in a rank; without the picture, which takes as long as some steps."""
    with pytest.MonkeyPatch.context() as patch:
        if not draws:
            patch.setattr(hooks, "draw_loss", lambda *_, **__: None)
        return job_run.train(options, stop)


def newest(folder):
    """The newest checkpoint of a run."""
    return max((folder / "checkpoints").iterdir())


def lines_of(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def column(folder, name):
    return [line[name] for line in lines_of(folder) if name in line]


def options_of(tiny, output, kind="chat", **changes):
    model, corpora = tiny
    data = {"path": str(corpora[kind]), "context": 128, "validation_fraction": 0.2, "validation_windows": 9}
    training = {"steps": 6, "batch_size": 6, "validate_every": 3, "checkpoint_every": 0, **RATE}
    made = {
        "output": str(output),
        "device": "cpu",
        "model": ModelOptions(path=str(model)),
        "data": DataOptions(**data),
        "train": TrainOptions(**training),
    }
    return Options(**{**made, **changes})


def check_opens(folder, source):
    """The folder is one of transformers', with the files beside the weights as they were."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    write = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert write("def ", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("def ")
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name
    return model


def answers(model, source, sample):
    """What transformers makes a model answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    found = []
    for prompt in sample.prompts:
        said = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        behind = model.generate(**ids, max_new_tokens=sample.tokens, do_sample=False)[0, ids["input_ids"].shape[1] :]
        found.append(tokenizer.decode(behind, skip_special_tokens=True))
    return found


@pytest.mark.ranks(2, timeout=240)
def test_stopped_and_gone_on_under_other_axes_it_is_the_run_that_was_never_stopped(tiny, tmp_path):
    sample = SampleOptions(prompts=("What does shlex.quote do?", "Say nothing."), tokens=4)
    whole, parts = (options_of(tiny, tmp_path / name, sample=sample) for name in ("whole", "parts"))
    assert train(whole, Stop()) == 0
    assert train(replace(parts, parallel=TENSOR, zero=1), StopAt(2)) == 0
    again = replace(parts, resume="auto", parallel=SEQUENCE)
    assert train(again, StopAt(2)) == 0
    pipeline = {"parallel": {"pipeline": 2}, "pipeline": ScheduleOptions(microbatches=3)}
    assert train(replace(parts, resume="auto", **pipeline), Stop(), draws=True) == 0
    dist.barrier()
    if dist.get_rank() > 0:
        return
    for name in ("step", "loss", "validation_loss", "perplexity", "gradient_norm", "learning_rate", "tokens"):
        assert column(tmp_path / "parts", name) == pytest.approx(column(tmp_path / "whole", name), rel=TOLERANCE), name
    losses, validation = column(tmp_path / "whole", "loss"), column(tmp_path / "whole", "validation_loss")
    assert column(tmp_path / "whole", "step") == list(range(1, 7))
    assert losses[-1] < losses[0] == pytest.approx(math.log(512), rel=0.05), "a guess, before the first step"
    assert len(validation) == 2
    assert validation == sorted(validation, reverse=True)
    assert column(tmp_path / "whole", "perplexity") == pytest.approx([math.exp(loss) for loss in validation])
    for name in ("whole", "parts"):
        samples = column(tmp_path / name, "samples")
        assert len(samples) == 2
        assert [[one["prompt"] for one in each] for each in samples] == [list(sample.prompts)] * 2
        assert all(one.keys() == {"prompt", "text"} for each in samples for one in each)
    source = tiny[0]
    models = [check_opens(newest(tmp_path / name), source) for name in ("whole", "parts")]
    assert [one["text"] for one in samples[-1]] == answers(models[-1], source, sample), "by the last weights"
    before = transformers.AutoModelForCausalLM.from_pretrained(source)
    moved = [
        torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before.parameters(), strict=True)])
        for model in models
    ]
    assert torch.nn.functional.cosine_similarity(moved[0], moved[1], dim=0) > 0.999, "they went the same way"
    names = {path.name for path in (tmp_path / "parts").iterdir()}
    assert {"checkpoints", "data", "loss.png", "metrics.jsonl", "pipeline-measured.png"} <= names
    assert len(list((tmp_path / "parts" / "data").iterdir())) == 1, "the tokens were made once"


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120)
def test_layers_again_dtypes_and_stage_3_train_the_same_model(tiny, tmp_path):
    """After 2 steps in bf16: 2 % is some 10 roundings."""
    short = TrainOptions(steps=2, batch_size=4, validate_every=2, **RATE)
    found = {}
    for name, changes in {
        "plain": {},
        "again": {"recompute": "layers", "zero": 3},
        "pipeline": {
            "model": ModelOptions(path=str(tiny[0]), attention="eager"),
            "recompute": "layers:2",
            "parallel": {"pipeline": 2},
        },
        "half": {"precision": "bf16", "parallel": TENSOR},
        "cut": {
            "recompute": "layers",
            "precision": "bf16-amp",
            "parallel": over("ring"),
            "zero": 2,
        },
    }.items():
        options = options_of(tiny, tmp_path / name, kind="jsonl", **{"train": short, **changes})
        assert train(options, Stop()) == 0
        dist.barrier()
        found[name] = column(tmp_path / name, "loss") + column(tmp_path / name, "validation_loss")
    assert found["again"] == pytest.approx(found["plain"], rel=TOLERANCE)
    assert found["pipeline"] == pytest.approx(found["plain"], rel=TOLERANCE)
    assert found["half"] == pytest.approx(found["plain"], rel=0.02)
    assert found["cut"] == pytest.approx(found["plain"], rel=0.02)
    if dist.get_rank() == 0:
        opened = transformers.AutoModelForCausalLM.from_pretrained(newest(tmp_path / "half"))
        assert opened.dtype == torch.bfloat16
        assert transformers.AutoConfig.from_pretrained(newest(tmp_path / "half")).dtype == torch.bfloat16


@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft asks it of a model
@pytest.mark.ranks(2, timeout=120)
def test_adapters_and_random_weights_are_the_same_under_every_topology(tiny, tmp_path):
    pytest.importorskip("peft")
    from peft import PeftModel

    source = tiny[0]
    short = TrainOptions(steps=3, batch_size=4, validate_every=3, **{**RATE, "learning_rate": 1e-2})
    pipeline = {"parallel": {"pipeline": 2}, "pipeline": ScheduleOptions(microbatches=2)}

    def run(name, stop, **changes):
        options = options_of(tiny, tmp_path / name, **{"train": short, **changes})
        ended = train(options, stop)
        dist.barrier()
        return ended

    adapter = {"adapter": AdapterOptions(rank=4, dropout=0.0)}
    assert run("whole", Stop(), **adapter) == 0
    assert run("parts", StopAt(1), **adapter, parallel=TENSOR, zero=1) == 0
    assert run("parts", Stop(), **adapter, **pipeline, resume="auto") == 0
    random = {"model": ModelOptions(config=str(source))}
    assert run("random", Stop(), **random, zero=1) == 0
    assert run("random tensor", Stop(), **random, parallel=SEQUENCE) == 0
    if dist.get_rank() > 0:
        return
    for one, other in (("whole", "parts"), ("random", "random tensor")):
        for name in ("loss", "validation_loss"):
            assert column(tmp_path / one, name) == pytest.approx(column(tmp_path / other, name), rel=TOLERANCE), name
    assert column(tmp_path / "whole", "loss")[-1] < column(tmp_path / "whole", "loss")[0]
    assert column(tmp_path / "random", "loss")[0] != column(tmp_path / "whole", "loss")[0]
    checkpoint = newest(tmp_path / "parts")
    names = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "optimizer"} <= names
    assert "model.safetensors" not in names, "the model that it is of is where it was"
    ids = transformers.AutoTokenizer.from_pretrained(checkpoint)("def ", return_tensors="pt")
    base = transformers.AutoModelForCausalLM.from_pretrained(source)
    before = base(**ids).logits
    through_peft = PeftModel.from_pretrained(base, checkpoint)(**ids).logits
    assert not torch.allclose(through_peft, before, atol=1e-3)
    through_transformers = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)(**ids).logits
    torch.testing.assert_close(through_transformers, through_peft)


def over(mode, **axes):
    """Axes with a sequence that is cut over two ranks."""
    return {"sequence": {"size": 2, "mode": mode}, **axes}


def check_handed_on(tiny, folder, changes, *, rows=4, **common):
    """A run that is stopped after each step, and goes on under other axes, is the run that was never stopped."""
    short = TrainOptions(steps=len(changes), batch_size=rows, validate_every=len(changes), checkpoint_every=0, **RATE)
    whole, parts = (options_of(tiny, folder / name, train=short, **common) for name in ("whole", "parts"))
    assert train(whole, Stop()) == 0
    for number, change in enumerate(changes):
        last = number == len(changes) - 1
        again = replace(parts, resume="auto" if number else "no", **change)
        assert train(again, Stop() if last else StopAt(1)) == 0, change
        dist.barrier()
    for name in ("step", "loss", "validation_loss", "gradient_norm", "tokens"):
        assert column(folder / "parts", name) == pytest.approx(column(folder / "whole", name), rel=TOLERANCE), name
    assert column(folder / "parts", "samples") == column(folder / "whole", "samples")  # of the last step


@pytest.mark.storm  # the trainer's tests pack documents, and the first test here goes on under each axis
@pytest.mark.ranks(2, timeout=120)
def test_packed_rows_are_cut_over_sequence_ranks_and_gone_on_with_whole(tiny, tmp_path):
    changes = [{"parallel": over("ring"), "zero": 3}, {}, {"parallel": over("ulysses"), "zero": 1}]
    data = DataOptions(path=str(tiny[1]["chat"]), context=126, validation_fraction=0.2, validation_windows=9)
    sample = SampleOptions(prompts=("What does shlex.quote do?", "Say nothing."), tokens=3)
    check_handed_on(tiny, tmp_path, changes, rows=6, data=data, sample=sample)
    if dist.get_rank() == 0:
        assert len(column(tmp_path / "parts", "samples")) == 1
        check_opens(newest(tmp_path / "parts"), tiny[0])


def hybrid_of(tiny, folder):
    """The tiny model's tokenizer, with a model of gated delta nets and attention; and the corpora."""
    source, corpora = tiny
    if dist.get_rank() == 0:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        config = transformers.Qwen3NextConfig(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=0,
            layer_types=["linear_attention", "full_attention"] * 2,
            max_position_embeddings=256,
            **{name: getattr(transformers.AutoConfig.from_pretrained(source), name) for name in TOKENS},
        )
        torch.manual_seed(0)
        transformers.Qwen3NextForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    return folder, corpora


TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@pytest.mark.skipif(not hasattr(transformers, "Qwen3NextConfig"), reason="transformers has no hybrid model")
@pytest.mark.ranks(2, timeout=240)
def test_a_hybrid_split_over_its_sequence_resumes_without_a_split(tiny, tmp_path):
    """Rows hold several documents, whose states are separated on one rank as on two."""
    hybrid = hybrid_of(tiny, tmp_path / "model")
    data = DataOptions(path=str(hybrid[1]["chat"]), context=126, validation_fraction=0.2, validation_windows=9)
    check_handed_on(
        hybrid, tmp_path, [{"parallel": over("gather")}, {}, {"parallel": over("ring"), "zero": 1}], data=data
    )


HANDED_ON = {
    "packed": [
        {"parallel": over("gather", **SEQUENCE), "zero": 1},
        {"parallel": over("ring", **TENSOR), "zero": 0},
        {"parallel": over("ulysses", pipeline=2), "pipeline": ScheduleOptions(microbatches=2)},
        {"parallel": {"sequence": {"size": 4, "mode": "2d", "ulysses": 2}}, "zero": 2},
        {"parallel": over("gather"), "zero": 3},  # and two data ranks
        {"parallel": {"pipeline": 2}, "pipeline": ScheduleOptions(microbatches=2)},
    ],
    "stream, adapters": [
        {"parallel": over("ring", pipeline=2), "pipeline": ScheduleOptions(microbatches=2)},
        {"parallel": over("gather", **SEQUENCE)},
        {"parallel": over("ulysses"), "zero": 1},
        {},
    ],
}


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120)
def test_a_mixture_goes_on_elsewhere_and_its_weights_stay(tiny, tmp_path):
    corpora = tiny[1]
    sources = ({"path": str(corpora["chat"]), "weight": 2}, {"path": str(corpora["jsonl"]), "weight": 1.5})
    data = DataOptions(sources=sources, context=128, validation_fraction=0.2, validation_windows=9)
    whole, parts = (options_of(tiny, tmp_path / name, data=data) for name in ("whole", "parts"))
    assert train(whole, Stop()) == 0
    assert train(parts, StopAt(2)) == 0
    again = replace(parts, resume="auto")
    other = ({**sources[0], "weight": 3}, sources[1])
    refused("has data.sources .*, but the config has .*'weight': 3", replace(again, data=replace(data, sources=other)))
    assert train(replace(again, parallel=TENSOR), Stop()) == 0
    dist.barrier()
    for name in ("loss", "validation_loss"):
        assert column(tmp_path / "parts", name) == pytest.approx(column(tmp_path / "whole", name), rel=TOLERANCE)


@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft asks it of a model
@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize("name", list(HANDED_ON))
def test_sequence_ranks_beside_all_others(tiny, tmp_path, name):
    common = {}
    if "adapters" in name:
        pytest.importorskip("peft")
        path = str(tiny[1]["chat"])
        data = DataOptions(path=path, packing="stream", context=126, validation_fraction=0.2, validation_windows=9)
        common = {"adapter": AdapterOptions(rank=4), "data": data}
    check_handed_on(tiny, tmp_path, HANDED_ON[name], **common)


def refused(words, options):
    with pytest.raises(UserError, match=words):
        train(options, Stop())


@pytest.mark.ranks(2, timeout=120)
def test_what_cannot_be_trained_on_is_refused_on_every_rank_before_anything_is_written(tiny, tmp_path):
    model, corpora = tiny
    options = options_of(tiny, tmp_path / "out")

    def with_data(**changes):
        return replace(options, data=replace(options.data, **changes))

    def with_samples(prompt, tokens):
        return replace(options, sample=SampleOptions(prompts=(prompt,), tokens=tokens))

    jsonl = replace(options.data, path=str(corpora["jsonl"]))
    if dist.get_rank() == 0:
        (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": 3}\n')
        (tmp_path / "empty.jsonl").write_text("\n\n")
        (tmp_path / "one.txt").write_text("a line\n")
        (tmp_path / "plain.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
        small = tmp_path / "small"
        small.mkdir()
        for path in model.iterdir():
            (small / path.name).write_bytes(path.read_bytes())
        config = json.loads((small / "config.json").read_text())
        (small / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
        bloom = tmp_path / "bloom"
        shutil.copytree(model, bloom, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        transformers.BloomConfig(
            vocab_size=512, hidden_size=32, n_layer=1, n_head=4, architectures=["BloomForCausalLM"]
        ).save_pretrained(bloom)
    dist.barrier()
    refused(r"bad\.jsonl, line 3 has 3 under 'text'; use a string", with_data(path=str(tmp_path / "bad.jsonl")))
    refused(r"empty\.jsonl' has no document", with_data(path=str(tmp_path / "empty.jsonl")))
    refused(r"the chat template does not mark", with_data(template=str(tmp_path / "plain.jinja")))
    refused(r"has 1 documents, of which", with_data(path=str(tmp_path / "one.txt"), format="text"))
    refused(r"data\.context is 257, but .*tiny.* has 256 positions", with_data(context=257))
    many = replace(options, train=replace(options.train, batch_size=2000))
    refused(r"rows of 128 tokens, less than a batch of train\.batch_size 2000", many)
    refused(
        r"knows 512 tokens, and the model's embedding has 300",
        replace(options, model=ModelOptions(path=str(tmp_path / "small"))),
    )
    refused(
        r"bloom': .* \(BloomAttention\) of BloomForCausalLM reads across the documents of a packed row",
        replace(options, model=ModelOptions(config=str(tmp_path / "bloom"))),
    )
    refused("Say.* tokens, which with sample.tokens 256 are more than the model's 256", with_samples("Say", 256))
    refused("'', of which the tokenizer makes no token", replace(with_samples("", 4), data=jsonl))
    adapter = AdapterOptions(rank=4, targets=("q_prj",))
    refused("q_prj", replace(options, adapter=adapter))
    refused("127 does not divide by 2 tensor ranks", replace(with_data(context=127), parallel=SEQUENCE))
    cut = replace(options, parallel=over("gather"))
    refused("adapter.dropout is 0.1, .* set it to 0", replace(cut, adapter=AdapterOptions(rank=2, dropout=0.1)))
    refused("model.attention is 'sdpa', .* leave it out", replace(cut, model=replace(options.model, attention="sdpa")))
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"data", ".par-train.lock"}


@pytest.mark.ranks(2, timeout=120)
def test_going_on_with_another_model_or_other_data_is_refused(tiny, tmp_path):
    _, corpora = tiny
    short = TrainOptions(steps=1, batch_size=4, **RATE)
    options = options_of(tiny, tmp_path / "out", train=short)
    assert train(options, Stop()) == 0
    again = replace(options, resume="auto")
    refused(
        r"the tokens of .*jsonl differ from the ones that the checkpoint",
        replace(again, data=replace(options.data, path=str(corpora["jsonl"]))),
    )
    refused("has data.context 128, but the config has 64", replace(again, data=replace(options.data, context=64)))
    refused("has seed 0, but the config has 1", replace(again, seed=1))
    refused("has precision 'fp32', but the config has 'bf16'", replace(again, precision="bf16"))
    gpt = {"data": DataOptions(folder=str(Path(corpora["text"]).parent)), "train": TrainOptions(batch_size=4)}
    refused(
        "is of a Hugging Face Transformers model, and the options train a byte-level GPT",
        Options(output=options.output, device="cpu", resume="auto", **gpt),
    )
    dist.barrier()
    if dist.get_rank() == 0:
        config = Path(options.model.path, "config.json")
        other = tmp_path / "other"
        other.mkdir()
        for path in config.parent.iterdir():
            (other / path.name).write_bytes(path.read_bytes())
        (other / "config.json").write_bytes(config.read_bytes() + b"\n")
    dist.barrier()
    refused("was trained from another model than", replace(again, model=ModelOptions(path=str(tmp_path / "other"))))


def test_one_command_fine_tunes_on_two_ranks_and_tells_of_a_wrong_line(tiny, tmp_path, command):
    model, corpora = tiny
    common = ["run", f"--model.path={model}", "--ranks=2", "--device=cpu", "--data.context=64", "--train.batch_size=4"]
    common += [
        "--train.steps=2",
        f"--output={tmp_path / 'out'}",
        "--parallel.tensor.size=2",
        "--parallel.tensor.mode=1d",
    ]
    done = command.finish(command.start(*common, f"--data.path={corpora['text']}", ranks=2), timeout=240)
    assert done.returncode == 0, done.stderr
    for words in (
        "LlamaForCausalLM, ",
        "2 ranks",
        "rows of 64 tokens",
        "perplexity",
        f"wrote {tmp_path}/out/checkpoints/step-00000002",
    ):
        assert words in done.stdout, done.stdout
    assert len(lines_of(tmp_path / "out")) == 2
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"no": 3}\n')
    wrong = [*common, "--overwrite", f"--data.path={tmp_path / 'bad.jsonl'}"]
    done = command.finish(command.start(*wrong, ranks=2), timeout=240)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"par-train: error: {tmp_path}/bad.jsonl, line 2 has no 'text', only 'no'; set field to the key of the text"
    ]
    assert len(lines_of(tmp_path / "out")) == 2, "the run in the folder is as it was"


@pytest.mark.ranks(2)
def test_a_run_that_is_asked_to_leave_while_it_tokenizes_leaves_at_once(tiny, tmp_path):
    options = options_of(tiny, tmp_path / "out")
    with pytest.raises(StoppedEarly, match="SIGTERM: stopped before training began") as raised:
        train(options, StopInCorpus())
    assert raised.value.number == signal.SIGTERM
    assert list((tmp_path / "out" / "data").iterdir()) == []
