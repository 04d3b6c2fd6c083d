"""Checks, before any change, that a Hugging Face Transformers model supports context parallelism."""

import ast
import dis
import textwrap
from collections.abc import Iterator, Sequence
from inspect import CO_VARKEYWORDS, getargs, getsource, isfunction, signature, unwrap
from types import CodeType

from torch import Tensor, nn

OF_ROWS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")
"""Parts of the names of models whose head reads one token of a sequence. Other ranks do not hold that token."""


def check_decoder(model: nn.Module) -> None:
    """Raise unless a context can compute the attention of a model. Changes nothing.

    Args:
        model: A decoder of Hugging Face Transformers.

    Raises:
        ValueError: The model is no Transformers decoder, or its attention cannot be replaced. Or it takes no
            position_ids, or counts positions from a number other than 0. Or a layer caps attention scores, computes
            with masks, or passes no keyword arguments to its attention. Or its head reads one token of a sequence, or
            its loss has a term that is not a sum over tokens.
    """
    import transformers  # noqa: PLC0415 - slow to import, and needed by nobody else

    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is no model of transformers; call context.attention in its code")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} has an encoder, whose tokens are not cut; use a decoder alone")
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__} adds a loss of its routers, of the tokens of all ranks together; set "
            "config.output_router_logits = False"
        )
    for name, module in model.named_modules():
        kind = type(module).__name__
        if getattr(getattr(module, "position_embeddings", None), "padding_idx", None) is not None:
            raise ValueError(
                f"{name or kind} counts positions from its padding index, as RoBERTa does, but split tokens have "
                "positions from 0; give the ranks of 'sequence' to data, tensor or pipeline"
            )
        for key, cap in _soft_caps(module).items():
            raise ValueError(
                f"{name or kind} caps the scores of its attention ({key}={cap}), which attention over ranks does not "
                f"support; give the ranks of 'sequence' to data, tensor or pipeline, or set config.{key} = None if the "
                "weights shall be trained without it"
            )
    _check_head(model)
    # Other parts, such as a tower for images, are not given split tokens.
    of_text = set(model.get_decoder().modules())
    for name, module in model.named_modules():
        child = next((child for child in module.children() if _attends(child)), None)
        if child is not None and module in of_text and not isinstance(module, nn.ModuleList) and _is_deaf(module):
            raise ValueError(
                f"{name or type(model).__name__} is {type(module).__name__}, whose code passes no keyword arguments "
                f"to its {type(child).__name__}, which needs par_tokens; pass **kwargs on, or use the ranks of "
                "'sequence' for data, tensor or pipeline"
            )
    # A number in a module's name is its position in a list of layers.
    in_layers = {
        type(each): name
        for name, each in model.named_modules()
        if each in of_text and any(part.isdigit() for part in name.split("."))
    }
    for kind_of_layer, name in in_layers.items():
        if _computes_with_mask(kind_of_layer):
            raise ValueError(
                f"{name} is {kind_of_layer.__name__}, whose code computes with its attention_mask (sparse attention "
                "does), but no rank has the mask of all tokens; give the ranks of 'sequence' to data, tensor "
                "or pipeline"
            )
    can_be_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_be_set is not None and not can_be_set():
        raise fixed(model)
    if "position_ids" not in signature(type(model).forward).parameters:
        raise ValueError(
            f"{type(model).__name__} takes no position_ids: on each rank it would count its tokens from the first one "
            "there; call context.attention and context.positions in its code"
        )


def _soft_caps(module: nn.Module) -> dict[str, float]:
    """Return the soft caps that a module passes to its attention, by attribute.

    The attribute alone is not enough: some models (Gemma 3) have it and ignore it.
    """
    code = _code(module)
    constants = () if code is None else code.co_consts  # names of keywords are constants, or tuples of them
    if not any(entry == "softcap" or (isinstance(entry, tuple) and "softcap" in entry) for entry in constants):
        return {}
    return {key: value for key, value in vars(module).items() if "softcap" in key and isinstance(value, int | float)}


def _attends(module: nn.Module) -> bool:
    """Return whether a module calls the attention that Transformers dispatches by name."""
    code = _code(module)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _is_deaf(module: nn.Module) -> bool:
    """Return whether the code of a module never reads its `**kwargs`."""
    code = _code(module)
    if code is None:
        return False
    # Without `**kwargs` there is no way for par_tokens.
    if not code.co_flags & CO_VARKEYWORDS:
        return True
    keywords = getargs(code).varkw
    read = (step.argval for step in dis.get_instructions(code))
    return not any(value == keywords or (isinstance(value, tuple) and keywords in value) for value in read)


def _code(module: nn.Module) -> CodeType | None:
    """Return the code of a module's forward without decorators; None if it is not a Python function."""
    code: CodeType | None = getattr(unwrap(type(module).forward), "__code__", None)
    return code


def fixed(model: nn.Module) -> ValueError:
    """Return the error for a model that does not dispatch its attention by name."""
    return ValueError(f"{type(model).__name__} does not let its attention be replaced; call context.attention in it")


def _check_head(model: nn.Module) -> None:
    """Raise unless the modules after the layers process each token separately.

    Raises:
        ValueError: The head scores a sequence by one of its tokens. Each rank would use a different token.
    """
    who = type(model).__name__
    takes = signature(type(model).forward).parameters
    if any(part in who for part in OF_ROWS) or "start_positions" in takes:
        raise ValueError(
            f"{who} has a head that reads one token of each row, and each rank would read one of its own; give the "
            "ranks of 'sequence' to data, tensor or pipeline, or use the decoder without the head"
        )
    pooler = next((name for name, module in model.named_modules() if type(module).__name__.endswith("Pooler")), None)
    if pooler is not None:
        raise ValueError(
            f"{who} has {pooler!r}, which reads the first token of each row, and each rank would read one of its own; "
            "make the model with add_pooling_layer=False"
        )


def check_outputs(model: nn.Module, args: object, output: object) -> None:
    """Raise unless a model returned logits per token. It is a forward hook.

    Args:
        model: The model.
        args: Positional arguments of the call.
        output: Output of the call.

    Raises:
        ValueError: The model returned logits per sequence.
    """
    del args
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.dim() < 3:  # [rows, tokens, classes]
        raise ValueError(
            f"{type(model).__name__} returned logits {list(logits.shape)} of full rows, computed from the tokens "
            "of one rank; use a head that scores tokens, or use the ranks of 'sequence' for data, tensor or pipeline"
        )


def _computes_with_mask(kind: type[nn.Module]) -> bool:
    """Return whether a module's code computes with its attention_mask, beyond passing it on or comparing it to None.

    Methods of the module that receive the mask count, too, unless another branch dispatches the attention by name: that
    one runs under a context.
    """
    waiting, seen = ["forward"], set[str]()
    while waiting:
        method = waiting.pop()
        seen.add(method)
        try:
            tree = ast.parse(textwrap.dedent(getsource(unwrap(getattr(kind, method)))))
        except (OSError, TypeError, SyntaxError):  # it was not read from a file
            continue
        replaced = {
            id(inside)
            for branch in ast.walk(tree)
            if isinstance(branch, ast.If) and any(map(_receives_mask, _walk(branch.orelse)))
            for inside in _walk(branch.body)
        }
        for node in ast.walk(tree):
            operands: list[ast.expr] = []
            if isinstance(node, (ast.Subscript, ast.Attribute)):
                operands = [node.value]
            elif isinstance(node, ast.BinOp):
                operands = [node.left, node.right]
            elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
                operands = [node.operand]
            if any(map(_is_mask, operands)):
                return True
            called = None if id(node) in replaced else _own_method(node)
            if called is not None and isfunction(getattr(kind, called, None)) and called not in seen:
                waiting.append(called)
    return False


def _is_mask(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "attention_mask"


def _walk(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    return (node for statement in statements for node in ast.walk(statement))


def _receives_mask(node: ast.AST) -> bool:
    """Return whether a node is a call that is passed attention_mask."""
    return isinstance(node, ast.Call) and any(map(_is_mask, (*node.args, *(each.value for each in node.keywords))))


def _own_method(node: ast.AST) -> str | None:
    """Return the name of the method if a node is `self.method(..., attention_mask, ...)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not _receives_mask(node):
        return None
    return node.func.attr if isinstance(node.func.value, ast.Name) and node.func.value.id == "self" else None
