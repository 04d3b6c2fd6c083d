"""`JobHooks`: what a job adds to a run: its banner, pictures and list of files, and the notes in its checkpoints."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from par_groups import Topology
from par_pipeline import Costs, Timeline, simulate
from par_precision import precision_of

from .._errors import UserError, as_user_error
from ..run.files import writing
from ..run.hooks import RunHooks, Spelling
from ..run.metrics import draw_load, draw_loss, read_metrics
from ..run.monitor import Monitor
from ..run.output import say
from .report import print_banner, print_summary
from .trainer import Trainer

START_ANEW = "start anew with --overwrite, and without --resume"

FLAGS = Spelling(
    resume="--resume auto",
    overwrite="--overwrite",
    folder="another folder with --output",
    tiers="--checkpoint.tiers",
)
"""The options of a run as flags of `par-train run`."""


class JobHooks(RunHooks):
    """The banner of a job, its curves, the list of its files, and what must not change between its runs.

    Args:
        trainer: Trainer of this rank.
        topology: Topology of the ranks.
    """

    def __init__(self, trainer: Trainer, topology: Topology) -> None:
        super().__init__(trainer.options.files)
        self._trainer, self._topology = trainer, topology
        self._timeline: Timeline | None = None
        self._first = 0  # step from which this run continues

    def notes(self, step: int) -> Mapping[str, Any]:
        """Return hashes of text and model, and options that must stay. Canonical numerics print a digest. Collective.

        Returns:
            `text` and `model`: hashes, "" of the byte GPT's model. `kept`: options by name. `digest`: of the weights,
            "" for ordinary numerics.
        """
        trainer, digest = self._trainer, ""
        if trainer.options.numerics == "canonical":
            digest = str(trainer.strategy.digest(trainer.model))
            if trainer.strategy.is_master:
                say(f"par-train: step {step} has digest {digest}")
        recipe = trainer.recipe
        named = {"text": trainer.data.digest, "model": recipe.source_digest, "kept": recipe.kept_options()}
        return {**named, "digest": digest}

    def check(self, state: Mapping[str, Any], path: str) -> None:
        """Check that resuming from a checkpoint continues the same run, and go to its position in the data.

        The length of a run and its learning rate may change. The model, the dtype of its weights, its rows and the seed
        may not.

        Raises:
            UserError: Something differs, or the position is not between two batches; the message names it.
        """
        trainer, saved, model = self._trainer, state["notes"], self._trainer.recipe.source_digest
        # From the coarsest difference to the finest, so that the message names the cause and not its consequence.
        if "kept" not in saved:
            raise UserError(f"{path!r} is no checkpoint of par-train run; {START_ANEW}")
        if bool(saved["model"]) != bool(model):
            kinds = ["a byte-level GPT", "a Hugging Face Transformers model"]
            remedy = "set --model.path to the model" if saved["model"] else "remove model.path and model.config"
            raise UserError(
                f"the checkpoint {path!r} is of {kinds[bool(saved['model'])]}, and the options train "
                f"{kinds[bool(model)]}; {remedy}, or {START_ANEW}"
            )
        if saved["model"] != model:
            raise UserError(
                f"the checkpoint {path!r} was trained from another model than the one that the options name; restore "
                f"the folder as it was, or {START_ANEW}"
            )
        for name, now in trainer.recipe.kept_options().items():
            was = saved["kept"].get(name)
            # Precisions with the same weights, such as fp32 and bf16-amp, may replace each other.
            if name == "precision" and precision_of(str(was)).weights == precision_of(now).weights:
                continue
            if was != now:
                raise UserError(
                    f"the checkpoint {path!r} has {name} {was!r}, but the config has {now!r}; set it back, or "
                    f"{START_ANEW}"
                )
        if saved["text"] != trainer.data.digest:
            raise UserError(
                f"the tokens of {' and '.join(trainer.data.names)} differ from the ones that the checkpoint {path!r} "
                f"was trained on; restore the files, their format and the tokenizer, or {START_ANEW}"
            )
        # `resume` moves the loader, too, but after it has loaded the weights, and it does not know the option's name.
        with as_user_error(f"train.batch_size {trainer.options.train.batch_size}: "):
            trainer.loader.load_state_dict(state["loaders"][0])
        self._first = state["steps"]

    def begin(self, step: int, until: int) -> None:
        """Print the banner, and that nothing is left to do, if so."""
        print_banner(self._trainer.options, self._topology, self._trainer)
        if step >= until:
            say(
                f"par-train: step {step} of train.steps {until} is done already, so no step is taken; raise "
                "--train.steps to train on, or pass --overwrite without --resume to start again",
                sys.stderr,
            )

    def collect(self) -> None:
        """Gather when the ranks of this pipeline did what in the last step. Collective over the pipeline."""
        strategy = self._trainer.strategy
        if strategy.schedule is not None and self._trainer.step > self._first:
            self._timeline = strategy.pipeline(self._trainer.model).timeline()

    def finish(self, step: int, until: int, ended_by: int, monitor: Monitor) -> None:
        """Draw the curves, and the last step of a pipeline if there is one, and print what was written."""
        del until
        trainer, options, files = self._trainer, self._trainer.options, self.files
        lines = read_metrics(files.metrics)
        guess = math.log(trainer.data.vocabulary)  # the loss of a model that gives every token the same probability
        uniform = (guess, f"uniform, log({trainer.data.vocabulary}) = {guess:.2f}")
        unit = f"loss (nats a {trainer.recipe.unit})"
        draw_loss(files.curve, lines, title=trainer.recipe.title, unit=unit, uniform=uniform)
        draw_load(files.load, lines)
        schedule = trainer.strategy.schedule
        if self._timeline is not None and schedule is not None:
            name = options.pipeline.schedule
            with writing(files.measured):
                self._timeline.draw(files.measured, f"{name}, measured, in seconds")
            with writing(files.predicted):
                simulated = simulate(schedule, Costs.measured(self._timeline))
                simulated.draw(files.predicted, f"{name}, predicted, in seconds")
        print_summary(options, lines, step, ended_by, guess)
        if monitor.goodput is not None:
            say(f"time       {monitor.goodput.summary()}")
