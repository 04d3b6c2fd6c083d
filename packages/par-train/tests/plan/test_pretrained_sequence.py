"""Plans of models of transformers over a sequence that is cut: a step receives and keeps what they say."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from par_plan import PretrainedShape, TrainingJob, predict
from par_testing import count_collectives
from par_train import Strategy

from .measured_runs import SavedPeak
from .test_measured_sequence import Messages, assert_bytes

transformers = pytest.importorskip("transformers", minversion="5.4")
from .test_pretrained import (  # noqa: E402 - after the skip
    CONTEXT,
    GLOO,
    IN_1D,
    IN_SEQUENCE,
    ROWS,
    batch,
    make,
    on_meta,
)

CLOSE = 0.02  # masks of labels and numbers of rows, which no formula counts
JOB = TrainingJob(batch=ROWS)


def assert_as_predicted(
    parallel,
    family="Llama",
    precision="fp32",
    documents=None,
    *,
    checkpointing=False,
    context=CONTEXT,
    close=CLOSE,
    **options,
):
    """Bytes and operations by kind, the mean over ranks; and what autograd keeps."""
    case = parallel, family, precision, documents, context
    with Strategy(parallel=parallel, precision=precision) as strategy:
        job = replace(JOB, precision=precision, documents=documents)
        planned = PretrainedShape(
            on_meta(family, **options), context=context, packed=documents is not None, checkpointing=checkpointing
        )
        made = predict(planned, strategy.groups.topology, job, GLOO).ranks[0]
        if documents is None and not checkpointing:  # the same question, of the strategy
            planned = strategy.plan(on_meta(family, **options), batch=ROWS, context=context)
            assert (planned.transfers, planned.memory) == (made.transfers, (made.memory,))
            assert "data x sequence: gradients" in str(planned)
            assert "attention" in str(planned)
        model = make(family, **options)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model, optimizer = strategy.initialize(model, torch.optim.AdamW(model.parameters()))
        model.train()
        rows, ranks = ROWS // strategy.groups.size("data"), strategy.groups.size("sequence")
        whole = batch(documents is not None, context)
        for _ in range(2):
            messages = Messages(strategy.groups)
            with SavedPeak(model.parameters()) as saved, count_collectives() as counted, messages:
                mine = {name: value[:rows] for name, value in whole.items()}  # any: all replicas have as many
                strategy.execute_pipeline(iter([mine]), model, None, optimizer)
                optimizer.step()
            optimizer.zero_grad()
        assert_bytes(counted.events, messages, strategy.groups, made.transfers, case)
        logits = 4 * rows * context // ranks * (51 if "tensor" in parallel else 101)
        if not checkpointing:  # whose saved tensors belong to torch
            peak = torch.tensor(saved.peak)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=strategy.groups["sequence"])  # of what was fetched, too
            assert made.memory.activations + logits == pytest.approx(peak.item(), rel=close), case


def over(mode, ranks=2, **options):
    return {"sequence": {"size": ranks, "mode": mode, **options}}


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120, backend="gloo")
def test_a_step_over_a_sequence_receives_and_keeps_what_was_predicted():
    """With fewer heads of keys, windows beside layers that see all, and packed documents."""
    assert_as_predicted(over("gather"), precision="bf16")
    assert_as_predicted(over("ring"), documents=(8, 8))
    assert_as_predicted(over("ulysses"), "Gemma3Text", sliding_window=4)


@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # for a new name
@pytest.mark.ranks(4, timeout=300, backend="gloo")
def test_steps_over_a_sequence_and_other_axes_receive_and_keep_what_was_predicted():
    for mode in ("gather", "ring", "ulysses"):
        for tensor in (IN_1D, IN_SEQUENCE):
            heads = {"num_key_value_heads": 4} if mode == "ulysses" else {}
            assert_as_predicted({**over(mode), "tensor": tensor}, "Qwen3", **heads)
        assert_as_predicted({**over(mode), "data": 2}, checkpointing=True)
        assert_as_predicted(over(mode, 4), "Mistral", sliding_window=5)
        assert_as_predicted(over(mode, 4), documents=(8, 8))
    assert_as_predicted(over("2d", 4, ulysses=2), precision="bf16")
    assert_as_predicted(over("2d", 4, ulysses=2, outer="gather"), "Gemma3Text", sliding_window=4)
    assert_as_predicted(over("gather", 4, keep=True, parts=1), documents=(8, 8))


HYBRIDS = ("Qwen3Next", "Bamba", "MiniMax")  # gated delta nets, Mamba-2, lightning attention
MORE_HYBRIDS = ("Lfm2", "NemotronH")  # short convolutions, Mamba-2
LAST = 0.03  # a plan is for a rank between two others; the last rank of a document passes no state on, and keeps less
needs_hybrids = pytest.mark.skipif(not hasattr(transformers, "NemotronHConfig"), reason="needs newer hybrid models")


@needs_hybrids
@pytest.mark.ranks(2, timeout=300, backend="gloo")
def test_hybrids_over_two_ranks_pass_and_keep_what_was_predicted():
    """States are as large at twice the length."""
    for family in HYBRIDS:
        for context in (16, 32):
            assert_as_predicted(over("gather"), family, context=context, max_position_embeddings=32, close=LAST)


@needs_hybrids
@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # for a new name
@pytest.mark.ranks(4, timeout=580, backend="gloo")
@pytest.mark.parametrize("family", HYBRIDS + MORE_HYBRIDS)
def test_hybrids_over_four_ranks_pass_and_keep_what_was_predicted(family):
    for context, mode in ((16, "ring"), (32, "gather")):
        assert_as_predicted(over(mode, 4), family, context=context, max_position_embeddings=32)
    assert_as_predicted(over("gather", 4), family, documents=(8, 8), close=LAST)  # each covers two ranks
    assert_as_predicted({**over("ring"), "data": 2}, family, precision="bf16", checkpointing=True)
