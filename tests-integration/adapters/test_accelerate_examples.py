"""Accelerate's own example scripts, one line of each changed, beside the script as it is on one process.

Its wheel lacks them: ACCELERATE_EXAMPLES names the folder `examples` of a copy of its repository. What they download,
a model, its tokenizer, a data set and a metric, lies under the same names in the folder where they run.
"""

import csv
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("evaluate")
pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
EXAMPLES = Path(os.environ.get("ACCELERATE_EXAMPLES", "/nowhere"))
pytestmark = [
    pytest.mark.storm,
    pytest.mark.skipif(
        not (EXAMPLES / "nlp_example.py").is_file(),
        reason="ACCELERATE_EXAMPLES names no folder with the examples of Accelerate's repository",
    ),
]

SCRIPTS = {
    "nlp_example": [],
    "complete_nlp_example": ["--with_tracking", "--checkpointing_steps", "epoch", "--output_dir", "saved"],
    "by_feature/gradient_accumulation": ["--gradient_accumulation_steps", "2"],
    "by_feature/automatic_gradient_accumulation": [],
    "by_feature/checkpointing": ["--checkpointing_steps", "epoch", "--output_dir", "saved"],
    "by_feature/early_stopping": [],
    "by_feature/memory": [],
    "by_feature/multi_process_metrics": [],
    "by_feature/tracking": ["--with_tracking"],
}
STRATEGIES = {
    "stage 3": "dict(parallel=dict(tensor=dict(size=2, mode='1d')), zero=3)",
    "stage 1": "dict(parallel=dict(tensor=dict(size=2, mode='1d')), zero=1)",
}
ADAPTER = "import functools, par_train.adapters.accelerate as ours"
METRIC = '''
"""Accuracy, and which predictions it was made of."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int64")
        features = datasets.Features({"predictions": whole, "references": whole})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(int(a == b) for a, b in zip(predictions, references)) / len(references)
        return {"accuracy": right, "f1": right, "predictions": "".join(str(int(each)) for each in predictions)}
'''
WORDS = (
    "the",
    "a",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "rain",
    "falls",
    "on",
    "old",
    "red",
    "house",
)


def prepare(folder):
    """A tiny BERT with its tokenizer, 64 + 37 pairs of sentences, and a metric, under the names that scripts load."""
    choose = random.Random(0)
    glue = folder / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    for split, pairs in (("train", 64), ("validation", 37)):
        with (glue / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["sentence1", "sentence2", "label", "idx"])
            for number in range(pairs):
                first, second = (" ".join(choose.choices(WORDS, k=choose.randint(3, 12))) for _ in range(2))
                same = choose.random() < 0.5
                rows.writerow([first, first if same else second, int(same), number])
    files = "".join(f"  - split: {split}\n    path: {split}.csv\n" for split in ("train", "validation"))
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS))]
    tokenizer = transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
    tokenizer.save_pretrained(folder / "bert-base-cased")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.5,  # so that predictions differ from one sentence to the next
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")


def run(folder, script, arguments, strategy=None):
    """What the script's main process says of each epoch: accuracy, and every prediction."""
    text = (EXAMPLES / f"{script}.py").read_text()
    launcher = [sys.executable]
    if strategy is not None:
        line = next(line for line in text.splitlines() if line.startswith("from accelerate import Accelerator"))
        changed = f"{line}; {ADAPTER}; Accelerator = functools.partial(ours.ParAccelerator, strategy={strategy})"
        text = text.replace(line, changed, 1)
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (folder / "script.py").write_text(text)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [*launcher, "script.py", "--cpu", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = re.findall(r"^epoch \d+: \{.*$", done.stdout, re.MULTILINE)
    assert said
    return said


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_of_theirs_with_one_changed_line(script, tmp_path):
    prepare(tmp_path)
    alone = run(tmp_path, script, SCRIPTS[script])
    assert "01" in alone[0] or "10" in alone[0]
    strategy = STRATEGIES["stage 3" if script == "nlp_example" else "stage 1"]
    assert run(tmp_path, script, SCRIPTS[script], strategy) == alone
