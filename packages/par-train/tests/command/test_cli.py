"""Mistakes in the input: one line, exit code 2, and no torch imported for it."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from par_train.command.cli import main
from par_train.config.settings import settings
from par_train.jobs.options import Options, PlanOptions, RenderOptions

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers, which is looked for, is not installed"
)

# Runs one command line after another in a Python in which importing torch is an error.
NO_TORCH = """
import contextlib, io, json, os, sys, traceback
sys.modules["torch"] = None
from par_train.command.cli import main
for line in sys.stdin:
    folder, arguments, variables = json.loads(line)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as left:
            code = left.code
        except BaseException:
            code = traceback.print_exc() or 1
    print(json.dumps([code or 0, out.getvalue(), err.getvalue()]), flush=True)
"""
SOURCES = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}


@pytest.fixture(scope="module", name="without_torch")
def without_torch_fixture():
    """Runs command lines, all in one process."""
    process = subprocess.Popen(
        [sys.executable, "-c", NO_TORCH], env=SOURCES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(folder, *arguments, **variables):
        process.stdin.write(json.dumps([str(folder), arguments, variables]) + "\n")
        process.stdin.flush()
        return subprocess.CompletedProcess(arguments, *json.loads(process.stdout.readline()))

    with process:
        yield run
        process.stdin.close()


def assert_one_line(done, *words):
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("par-train: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the same again " * 4000)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["none.toml"], ["cannot read the config file none.toml"]),
        (["broken.toml"], ["broken.toml is not TOML", "correct it there"]),
        (["typo.toml"], ["'train.step'", "did you mean 'train.steps'"]),
        (["--train.step=3"], ["'train.step'", "did you mean 'train.steps'"]),
        (["--resum=auto"], ["did you mean 'resume'"]),
        (["--train.steps=many"], ["train.steps is 'many' (str)", "a whole number"]),
        (["--train.steps"], ["expected one argument"]),
        (["one.toml", "two.toml"], ["unexpected argument 'two.toml'"]),
        (["--parallel.data=3"], ["3", "2 ranks"]),
        (["--parallel.data"], ["needs an axis and a value"]),
        (["--parallel.dta=2"], ["'dta'", "did you mean 'data'"]),
        (["--parallel.tensor.size=2"], ["parallel['tensor'] has size 2 but no mode", "'1d'"]),
        (["--parallel.tensor.mode=2d", "--ranks=3"], ["mode '2d' needs q*q ranks, but the size is 3"]),
        (
            ["--parallel.expert=2"],
            ["parallel.expert deals experts out", "model.experts is 0; give"],
        ),
        (["--parallel.pipeline=2", "--pipeline.schedule=1f2b"], ["pipeline.schedule '1f2b'", "1f1b", "zb_v"]),
        (["--parallel.pipeline=2", "--pipeline.microbatches=64"], ["pipeline.microbatches is 64", "has 32 windows"]),
        (["--parallel.pipeline=2", "--model.layers=1"], ["'1f1b' with 2 ranks: 1 layers cannot be cut into 2 parts"]),
        (["--parallel.pipeline=2", "--pipeline.schedule=zb_h1", "--zero=3"], ["zero=3", "'zb_h1'", "use zero=2"]),
        (["--precision=fp64"], ["precision", "'fp64'", "bf16"]),
        (["--train.batch_size=3"], ["train.batch_size 3", "2 data ranks", "use 4"]),
        (["--model.heads=3"], ["model.width 128", "model.heads 3"]),
        (["--data.folder=nowhere"], ["'nowhere'", "not a folder"]),
        (["--data.folder=empty"], ["'empty' holds no text file"]),
        (["--data.folder=short"], ["gives 0 windows of model.context 128", "train.batch_size 32", "pass a folder"]),
        (["--output=broken.toml"], ["cannot write to the output folder 'broken.toml'", "--output"]),
        (["--output=broken.toml/below"], ["cannot write to the output folder 'broken.toml/below'"]),
        (["--output=/proc/nothing"], ["cannot write to the output folder '/proc/nothing'"]),
        (["--output=s3://bucket/run"], ["output 's3://bucket/run' is a URL", "--output", "checkpoint.tiers"]),
        (["--output=old"], ["'old' holds a run already", "--resume auto", "--overwrite"]),
        (["--checkpoint.copies=2"], ["checkpoint.copies is 2", "no checkpoint.tiers", "/dev/shm"]),
        (["--checkpoint.tiers=a,b", "--checkpoint.keep_last=1,2,3"], ["[1, 2, 3] for 2 tiers", "one for each"]),
        (["--checkpoint.tiers=a", "--checkpoint.keep_last=x"], ["checkpoint.keep_last is 'x'", "whole numbers"]),
        (["--checkpoint.keep_last=2,3"], ["checkpoint.keep_last is [2, 3] for 0 tiers"]),
        (["--resume=auto", "--overwrite"], ["resume auto goes on, overwrite starts anew; give one"]),
    ],
)
def test_mistakes(without_torch, folder, flags, words):
    (folder / "broken.toml").write_text("steps =")
    (folder / "typo.toml").write_text("[train]\nstep = 3")
    for name in ("empty", "short", "old"):
        (folder / name).mkdir()
    (folder / "short" / "a.txt").write_text("short")
    (folder / "old" / "metrics.jsonl").write_text("{}")
    assert_one_line(without_torch(folder, "run", "--data.folder=text", "--device=cpu", *flags), *words)
    assert not (folder / "runs").exists() or "output" not in flags[0]


TINY = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--model.path=tiny", "--model.width=64"],
            ["model.width is for the byte-level GPT", "'tiny'", "leave one out"],
        ),
        (["--model.path=tiny", "--data.folder=text"], ["data.folder is for the byte-level GPT", "model.path 'tiny'"]),
        (
            ["--data.documents=paragraphs"],
            ["data.documents is 'paragraphs', but data.packing is 'auto'", "give data.packing 'whole'"],
        ),
        (["--data.path=corpus.jsonl"], ["data.path is for a model of transformers", "add --model.path"]),
        (["--adapter.rank=4"], ["adapter.rank is for a model of transformers", "leave adapter.rank out"]),
        (["--sample.prompts=a"], ["sample.prompts is for a model of transformers"]),
        (["--model.path=tiny", "--model.config=tiny"], ["model.path is 'tiny'", "model.config is 'tiny'", "give one"]),
        (["--model.path=tiny", "--adapter.alpha=4"], ["adapter.alpha is given, but adapter.rank is 0"]),
        (["--model.config=tiny", "--adapter.rank=4"], ["adapter.rank is 4 with model.config", "use model.path"]),
        (["--model.path=tiny", "--sample.tokens=4"], ["sample.prompts is empty", "give a prompt"]),
        (["--model.path=tiny", "--parallel.tensor.mode=2d", "--ranks=4"], ["'2d', which cuts activations", "'1d'"]),
        (["--model.path=tiny"], ["data.path is missing", "name the file"]),
        (
            ["--model.path=none", "--data.path=corpus.jsonl"],
            ["model.path 'none' holds no config.json", "save_pretrained"],
        ),
        (["--model.path=broken", "--data.path=corpus.jsonl"], ["broken/config.json' cannot be read", "mend it"]),
        (["--model.path=list", "--data.path=corpus.jsonl"], ["list/config.json' holds a list", "must hold a table"]),
        (["--model.path=bare", "--data.path=corpus.jsonl"], ["'bare' holds no weights", "model.config"]),
        (["--model.config=bare", "--data.path=corpus.jsonl"], ["'bare' holds no tokenizer"]),
        (
            ["--model.path=tiny", "--data.path=nowhere"],
            ["data.path: the corpus 'nowhere' does not exist", "correct the path"],
        ),
        (
            ["--model.path=tiny", '--data.sources=[{path="a", weight=1}]'],
            ["data.sources[0]: the corpus 'a' does not exist"],
        ),
        (["--model.path=tiny", "--data.sources=a"], ["data.sources is 'a'", "a list of tables with a path"]),
        (["--model.path=tiny", "--data.path=corpus.jsonl", "--data.template=no"], ["data.template is 'no'"]),
        (["--model.path=tiny", "--data.path=corpus.jsonl", "--data.context=65"], ["65", "has 64 positions", "at most"]),
    ],
)
@needs_transformers
def test_mistakes_with_a_model_of_transformers(without_torch, folder, flags, words):
    configs = {"tiny": json.dumps(TINY), "bare": json.dumps(TINY), "broken": "{", "list": "[]"}
    for name, text in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / "tiny" / name).write_text("")
    (folder / "corpus.jsonl").write_text('{"text": "a"}')
    assert_one_line(without_torch(folder, "run", "--device=cpu", *flags), *words)
    assert not (folder / "runs").exists()


WITHOUT_TRANSFORMERS = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in sys.argv[1] else found(name, package)
from par_train.command.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("absent", "flags", "remedy"),
    [
        ("transformers", [], "needs transformers, which is not installed; pip install transformers jinja2"),
        ("peft", ["--adapter.rank=4"], "needs peft, which is not installed; pip install peft"),
    ],
)
@needs_transformers
def test_packages_that_are_not_installed_are_named_with_their_extra(tmp_path, absent, flags, remedy):
    words = [absent, "run", "--model.path=tiny", "--data.path=corpus.jsonl", *flags]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env=SOURCES,
        cwd=tmp_path,
    )
    assert_one_line(done, remedy)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--world is missing", "par-train plan --help"]),
        (["--world=8"], ["--device-memory is missing", "80GB"]),
        (["--world=8", "--device-memory=lots"], ["--device-memory is 'lots'", "80GiB"]),
        (["--world=eight", "--device-memory=80GB"], ["--world is 'eight'", "a whole number"]),
        (["--world=8", "--device-memory=80GB", "--top=0"], ["--top is 0; it must be at least 1"]),
        (["--world=8", "--device-memry=80GB"], ["unknown flag --device-memry", "did you mean --device-memory"]),
        (["--world=8", "--device-memory=80GB", "--train.step=3"], ["did you mean 'train.steps'"]),
        (["none.toml", "--world=8", "--device-memory=80GB"], ["cannot read the config file none.toml"]),
    ],
)
def test_mistakes_of_a_plan(without_torch, folder, flags, words):
    assert_one_line(without_torch(folder, "plan", *flags), *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--parallel.pipeline=3"], ["8 ranks", "pipeline 3"]),
        (["--parallel.data=8", "--train.batch_size=12"], ["train.batch_size 12", "8 data ranks"]),
        (["--parallel.pipeline=8"], ["4 layers cannot be cut into 8 parts"]),
    ],
)
def test_a_world_that_the_config_does_not_divide(capsys, flags, words):
    assert main(["plan", "--world=8", "--device-memory=80GB", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert all(word in said.err for word in words), said.err


INTERRUPTED = """
import sys

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == "par_train.config.settings":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from par_train.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_while_the_command_is_imported_is_one_line():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], check=False, capture_output=True, text=True, timeout=240, env=SOURCES
    )
    assert (done.returncode, done.stderr) == (130, "par-train: SIGINT: stopped before training began\n")


def test_no_command(without_torch):
    assert_one_line(without_torch("."), "par-train run")


def test_an_unknown_command(without_torch):
    assert_one_line(without_torch(".", "rum"), "'rum'", "run")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["plan", "--help"], ["render", "--help"], ["--version"]]
)
def test_help_needs_no_torch(without_torch, arguments):
    done = without_torch(".", *arguments)
    assert done.returncode == 0, done.stderr
    assert "par-train" in done.stdout


def test_help_names_every_key(without_torch):
    for command in ("run", "plan", "render"):
        text = without_torch(".", command, "--help").stdout
        assert all(f"{setting.flag} " in text or f"{setting.flag}, " in text for setting in settings(Options).values())
        own = {"plan": PlanOptions, "render": RenderOptions}.get(command, Options)
        assert all(f"{setting.flag} " in text or f"{setting.flag}, " in text for setting in settings(own).values())


def test_rendering_needs_no_torch(without_torch, folder):
    for words in (["slurm"], ["ray"], ["kubernetes", "--image=par"]):
        done = without_torch(folder, "render", *words, "--world=8")
        assert done.returncode == 0, done.stderr
        assert "8 ranks on 1 node, written by" in done.stdout


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_joined_ranks_the_master_speaks(without_torch, folder, rank):
    world = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = without_torch(folder, "run", "--train.batch_size=3", **world)
    assert done.returncode == 2
    assert done.stderr.count("par-train: error: ") == (rank == "0")
    assert "Traceback" not in done.stderr


def test_a_number_of_ranks_that_others_have_not_started_is_refused(without_torch, folder):
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert_one_line(without_torch(folder, "run", "--ranks=4", **world), "ranks is 4, but torchrun has started 2")


def test_half_an_environment_is_named(without_torch, folder):
    done = without_torch(folder, "run", RANK="0", WORLD_SIZE="2", MASTER_PORT="1")
    assert_one_line(done, "MASTER_ADDR")
