"""Unmodified transformers models: their batches, their loss, and how to find them in a module.

transformers is not imported here: a program that has one of its models has imported it.
"""

import inspect
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from par_groups import attributes

from ..context.existing.documents import FOUND, check_packed_batch, packed_documents
from ..models.parallel import Parallelization, parallelization_of
from .images import check_images, image_positions, split_images
from .placeholder_trial import PlaceholderTrial

IGNORE_INDEX = -100
"""The label of a token that does not count; the default of torch's cross entropy."""

TOKENS = "par_tokens"
"""The keyword of a batch, and then of a transformers model, that describes how its sequence was split."""


def pretrained_of(model: nn.Module) -> Any:
    """Return the transformers model that a module is, contains, or is this rank's part of; None if there is none."""
    # A pipeline stage has parts of a model. The attribute is None if that model is not one of transformers.
    if attributes.PRETRAINED.is_on(model):
        return attributes.PRETRAINED.of(model)
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return None
    return next((each for each in model.modules() if isinstance(each, modeling.PreTrainedModel)), None)


def parallelization_around(model: nn.Module) -> Parallelization | None:
    """Return the parallelization of a model, or of the model of which a pipeline stage has parts; None without one."""
    whole = attributes.PRETRAINED.of(model)
    return parallelization_of(model if whole is None else whole)


def pretrained_in(model: nn.Module) -> list[Any]:
    """Return the outermost transformers models in a module, the module itself included."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    found: list[Any] = []
    inside: set[nn.Module] = set()
    for module in () if modeling is None else model.modules():
        if module not in inside and isinstance(module, modeling.PreTrainedModel):
            found.append(module)
            inside.update(module.modules())
    return found


def unlike_causal(model: nn.Module) -> str | None:
    """Return the reason why a model's loss is not, or may not be, the causal loss; None if it is the causal loss.

    The causal loss is the loss of the next token. A model computes it if its forward passes its unchanged logits to
    transformers' own function. The name of the class is no evidence: `BartForCausalLM` shifts no labels.

    Args:
        model: A transformers model, a module that contains one, or this rank's part of one.
    """
    pretrained: Any = pretrained_of(model)
    if pretrained is None:
        return f"a {type(model).__name__} is no transformers model"
    losses: Any = sys.modules.get("transformers.loss.loss_utils")
    outside = getattr(model, "_orig_mod", model)  # as torch.compile has it
    peft: Any = sys.modules.get("peft")
    is_itself = outside is pretrained or attributes.PRETRAINED.is_on(outside)
    if not is_itself and (peft is None or not isinstance(outside, peft.PeftModel)):
        return f"a {type(outside).__name__} contains a {type(pretrained).__name__} and may compute its own loss"
    tuner: Any = pretrained if is_itself else outside.base_model
    if tuner is not pretrained and "loss" in inspect.unwrap(type(tuner).forward).__code__.co_names:
        return f"{type(tuner).__name__} of peft adds to the loss"
    code = inspect.unwrap(type(pretrained).forward).__code__
    kind = type(pretrained).__name__
    if pretrained.config.is_encoder_decoder or "loss_function" not in code.co_names:
        return f"{kind} computes its own loss"
    if {"shift_logits", "shifted_logits"} & set(code.co_varnames):
        return f"{kind} shifts its logits before"
    if getattr(pretrained.config, "z_loss_coefficient", None):
        return f"{kind} adds {pretrained.config.z_loss_coefficient} of a z-loss"
    # Over tensor ranks, par-layers replaces the function by one with an attribute `shifts`; a Trainer wraps it.
    own = inspect.unwrap(pretrained.loss_function)
    shifts: bool = own is losses.ForCausalLMLoss
    if not getattr(own, "shifts", shifts):
        return f"{kind} computes {getattr(own, '__name__', 'its own')}"
    if (name := sees_later_tokens(pretrained)) is not None:
        return f"{name!r} of {kind} lets each token attend to later tokens"
    return None


def sees_later_tokens(model: nn.Module) -> str | None:
    """Return the name of an attention module that lets tokens attend to later tokens; None if none is known.

    Encoders such as BERT have a class with the causal loss too. Their attention is bidirectional unless the config has
    `is_decoder=True`, so that the loss of the next token, which each token can read, would be meaningless.

    Args:
        model: A transformers model.
    """
    whole: Any = model
    text: nn.Module | None = whole.get_decoder() if hasattr(whole, "get_decoder") else None
    name: str
    for name, module in (text or model).named_modules():
        said: dict[str, Any] = vars(module)
        kind = type(module).__name__
        if "cross" in name.lower() or "Cross" in kind or "Vision" in kind or "Attention" not in kind:
            continue
        if said.get("is_decoder") is False or ("is_decoder" not in said and said.get("is_causal") is False):
            return name
    return None


def balance_factor(model: Any) -> float:
    """Return the coefficient of the router loss that a transformers model adds to its own loss.

    Args:
        model: The model, with the coefficient as an attribute or in its config.

    Raises:
        ValueError: The coefficient has none of the names that transformers uses.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for holder in (model, config, text):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if isinstance(factor := getattr(holder, name, None), int | float):
                return float(factor)
    raise ValueError(
        f"{type(model).__name__} returns an aux_loss, and neither it nor its config has router_aux_loss_coef or "
        "aux_loss_coef, so its coefficient is unknown; pass a criterion, or set config.router_aux_loss_coef"
    )


class CausalModel:
    """The arguments and the loss of a causal language model of transformers; the loss is a sum over labelled tokens.

    Args:
        model: A transformers model, a module that contains one, or this rank's part of one.

    Attributes:
        config: The configuration of the transformers model.
        reads_images: Whether batches may have images or videos.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = pretrained_of(model)
        self.config = self._model.config
        self._known: Parallelization | None = parallelization_around(model)
        names = inspect.signature(inspect.unwrap(type(self._model).forward)).parameters
        # A model around it may take more, such as the numbers of tasks of an adapter.
        around = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
        self._takes = {*names, *around} - {"input_ids", "labels", "shift_labels", "num_items_in_batch"}
        self._placeholder_trial = PlaceholderTrial(self._model)
        self.reads_images = any(name.startswith("pixel_values") for name in names)
        # A prepared model takes positions also if its forward does not: they describe documents.
        self._separates = "position_ids" in names or hasattr(self._model, FOUND)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in names.values())
        # With a cache, transformers does not separate documents. Some forwards take `use_cache` without naming it, and
        # a model with images has it in the configuration of its text.
        text = self.config.get_text_config()
        self._may_cache = "use_cache" in names or (takes_any and hasattr(text, "use_cache"))

    def fed(self, batch: Mapping[str, Any], *, places: bool = False) -> tuple[tuple[Tensor], dict[str, Any], Tensor]:
        """Convert a batch of a collator into arguments of the model and labels.

        Args:
            batch: `input_ids`, [rows, time], perhaps `labels` or `shift_labels`, and other keywords of the forward.
            places: Whether to add the positions of images, which pipeline stages without token ids need.

        Returns:
            Positional arguments and keywords of the forward; and the label of the next token for each token, int64,
            [rows, time], -100 for no label. Labels are shifted here, before rows or time are split. In a batch with
            `par_tokens`, which was split over sequence ranks, they are shifted already.

        Raises:
            ValueError: The batch has no ids, images that do not fit its placeholders, or a mask in addition to
                positions that restart in a row. Or positions restart, and the model takes no positions or cannot
                separate documents.
        """
        labels = next_labels(batch)
        check_images(self.config, self._takes, batch, self._placeholder_trial)
        # Here, because every stage of a pipeline gets the batch, and the first one alone calls the model's own forward.
        check_packed_batch(getattr(self._model, FOUND, None), batch)
        keywords = {name: value for name, value in batch.items() if name in self._takes and value is not None}
        positions = image_positions(self._model, batch, always=places)
        if self._separates and positions is not None:
            keywords["position_ids"] = positions
        elif isinstance(positions, Tensor) and packed_documents(positions) is not None:
            raise ValueError(
                f"{type(self._model).__name__} takes no position_ids, so the documents of packed rows would read each "
                "other; call par_layers.separate_documents_(model) before you shard the model, or put one document in "
                "each row"
            )
        if self._may_cache:
            keywords["use_cache"] = False
        if TOKENS in batch:
            keywords[TOKENS] = batch[TOKENS]
        return (batch["input_ids"],), keywords, labels

    def split_images(self, batch: Mapping[str, Any], parts: int) -> dict[str, list[Any]]:
        """Split the images of a batch that `fed` accepts among microbatches: each gets the images of its rows.

        Args:
            batch: A batch of a collator.
            parts: Number of microbatches. Their rows are those of `torch.tensor_split`.

        Returns:
            Entries of the microbatches by key; None for a microbatch without images.

        Raises:
            ValueError: The numbers of placeholders do not show which row an image belongs to.
        """
        return split_images(self.config, self._takes, batch, parts, self._placeholder_trial)

    def without_gathering(self) -> AbstractContextManager[None]:
        """A context in which a model over tensor ranks returns sharded logits, as `loss` takes them."""
        return nullcontext() if self._known is None else self._known.sharded_logits()

    def loss(self, outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the token losses and the number of labelled tokens.

        Args:
            outputs: The outputs of the model, or only its logits, as the last stage of a pipeline returns them.
            labels: The label of the next token for each token, int64, [rows, time].

        Raises:
            ValueError: The logits are of other tokens.
        """
        found = logits_of(outputs).shape[:2]
        if found != labels.shape:
            raise ValueError(
                f"criterion=None: it means the loss of the next token of {list(labels.shape)} tokens, and the model "
                f"returns logits of {list(found)}, as with the virtual tokens of a prompt; pass a "
                "criterion(outputs, batch)"
            )
        if self._known is None or self._known.vocabulary is None:  # such as a plan without a rule for the head
            total, count = causal_lm_loss(outputs, {"shift_labels": labels})
        else:
            total, count = self._known.cross_entropy(logits_of(outputs), labels, shift=False)
        balance = None if isinstance(outputs, Tensor) else getattr(outputs, "aux_loss", None)
        if balance is not None:  # a mean over tokens already: it is weighed like its tokens
            total = total + balance_factor(self._model) * balance * count
        return total, count


def causal_lm_loss(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the causal loss of full logits: the sum over labelled tokens, in fp32 at least, and their number.

    To get the mean over several batches, add up their sums and numbers before you divide.

    Args:
        outputs: The outputs of a causal language model, or its logits [rows, time, vocabulary].
        batch: `labels`, or else `input_ids`, [rows, time], with -100 for no label; or `shift_labels`, already shifted.
    """
    logits, labels = logits_of(outputs), _next_labels(batch)
    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    total = functional.cross_entropy(flat, labels.reshape(-1), reduction="sum", ignore_index=IGNORE_INDEX)
    return total, (labels != IGNORE_INDEX).sum()


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of the outputs of a causal language model, which may be the logits themselves."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


def next_labels(batch: Mapping[str, Any]) -> Tensor:
    """Return the label of the next token for each token of a collator's batch, [rows, time]; -100 for the last.

    Raises:
        ValueError: The batch has no ids, or a mask in addition to positions that restart in a row.
    """
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"the batch has {sorted(batch)}, but no tensor `input_ids`; pass the dict that a collator returns"
        )
    if mask is not None and batch.get("position_ids") is not None and TOKENS not in batch:
        raise ValueError(
            f"the batch has attention_mask and position_ids, of {tuple(ids.shape)} tokens: with a mask, transformers "
            "silently attends across the documents of a packed row; remove attention_mask for packed rows, or "
            "position_ids for padded rows"
        )
    if mask is not None and batch.get("labels") is None:
        batch = {**batch, "labels": ids.masked_fill(mask == 0, IGNORE_INDEX)}
    return _next_labels(batch)


def _next_labels(batch: Mapping[str, Any]) -> Tensor:
    """Return the label of the next token for each token of a batch, [rows, time]; -100 for the last."""
    shifted = batch.get("shift_labels")
    if shifted is None:
        labels = batch.get("labels")
        labels = batch["input_ids"] if labels is None else labels
        shifted = functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].contiguous()
    next_labels: Tensor = shifted
    return next_labels
