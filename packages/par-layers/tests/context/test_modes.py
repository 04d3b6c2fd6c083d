"""Every mode equals torch's attention on one device, sends what its formula says, and leaves no rank waiting."""

import math
import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from par_groups import ProcessGroups, Topology
from par_layers import AttentionShape, Context, Mask, _torch_private, attention_memory, context_attention
from par_layers.context.cost import received
from par_layers.context.kernels.choose import Kernels
from par_layers.context.modes import attention as attention_module
from par_layers.context.modes import gather as gather_module
from par_layers.context.modes import ulysses as ulysses_module
from par_testing import count_collectives, step, storm

from .reference import attention, numbers

S = 37
STEPS = Mask.from_intervals([max(0, t - 3 * (t % 3)) for t in range(S)], [min(S, t + t % 5) for t in range(S)])
"""A mask of no kind, under which some tokens see nothing."""

TYPICAL = [  # mask, documents, key heads, length
    (Mask(causal=True), None, 2, S),
    (Mask(), [1, 2, 20, 14], 1, S),
    (Mask(causal=True, window=7), [[37], [30, 7]], 4, S),
    (STEPS, None, 2, S),
    (Mask(causal=True, prefix=9), [20, 17], 4, S),
    (Mask(causal=True), None, 4, 1),
]
MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(causal=True, window=1),
    Mask(causal=True, window=7),
    Mask(causal=True, window=S),
    Mask(window=5),
    Mask(causal=True, prefix=9),
    Mask(causal=True, chunk=10),
    STEPS,
]
EVERY = [
    *(
        (mask, documents, heads, S)
        for mask in MASKS
        for documents in (None, [1, 2, 20, 14], [[37], [30, 7]])
        for heads in (4, 2, 1)
    ),
    *((mask, None, heads, length) for mask in MASKS[:4] for heads in (4, 1) for length in (1, 15, 17, 123)),
]
MODES = {
    1: [{"mode": "gather"}, {"mode": "ring"}, {"mode": "ulysses"}],
    2: [
        {"mode": "gather", "split": "balanced"},
        {"mode": "gather", "split": "zigzag", "parts": 1, "keep": True},
        {"mode": "ring", "split": "zigzag"},
        {"mode": "ulysses"},
    ],
    4: [
        {"mode": "gather", "split": "zigzag"},
        {"mode": "ring", "split": "balanced"},
        {"mode": "2d", "ulysses": 2, "split": "zigzag"},
        {"mode": "2d", "ulysses": 2, "outer": "gather", "keep": True},
    ],
    8: [{"mode": "2d", "ulysses": 4, "split": "zigzag"}],
}
MORE = {
    **MODES,
    4: [
        *MODES[4],
        {"mode": "gather", "split": "contiguous", "parts": 4},
        {"mode": "gather", "split": "balanced", "keep": True},
        {"mode": "ring", "split": "contiguous"},
        {"mode": "ring", "split": "zigzag"},
        {"mode": "ulysses"},
        {"mode": "2d", "ulysses": 4},
        {"mode": "2d", "ulysses": 1},
    ],
}


def live(config):
    """The groups of a world whose ranks are all on the axis of the sequence."""
    world = dist.get_world_size()
    return ProcessGroups(Topology.from_config({"sequence": {"size": world, **config}}, world))


def compare(context, mask, documents, key_heads, length, *, heads=4, sinks=None):
    """Output and all gradients of whole rows, cut here, with those of one device."""
    q, k, v = (numbers(2, length, h, 8, seed=seed) for seed, h in enumerate((heads, key_heads, key_heads)))
    (mine_q, mine_k, mine_v), tokens = context.cut((q, k, v), documents=documents, masks=(mask,), pad=True)
    out = context.gather(context.attention(mine_q, mine_k, mine_v, tokens, mask=mask, sinks=sinks), tokens)
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    expected = attention(q, k, v, mask, tokens, sinks=sinks)
    upstream = numbers(*expected.shape, seed=9).detach()
    found = torch.autograd.grad(out, inputs, upstream / context.ranks)  # as `gather` sums those of all ranks
    found = [context.sum(gradient) for gradient in found]
    gradients = torch.autograd.grad(expected, inputs, upstream)
    for what, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), (out, *found), (expected, *gradients), strict=False):
        say = f"{what}, {context.mode}, {context.how}, {mask}, {documents}, {key_heads} key heads, {length} tokens: "
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda text, say=say: say + text)  # order of sums


def run_cases(configs, cases):
    for config in configs:
        with live(config) as groups:
            context = Context(groups, block=16)
            for case in cases:
                compare(context, *case)


@pytest.mark.ranks([storm(1), storm(2), 4])
def test_output_and_gradients_are_those_of_one_device():
    run_cases(MODES[dist.get_world_size()], TYPICAL)


@pytest.mark.storm
@pytest.mark.ranks([1, 2, 4], timeout=500)
def test_output_and_gradients_in_every_product_of_modes_masks_and_documents():
    run_cases(MORE[dist.get_world_size()], EVERY)


@pytest.mark.storm
@pytest.mark.ranks(8, timeout=300)
def test_two_by_four():
    for config in MODES[8]:
        with live(config) as groups:
            for case in TYPICAL:
                compare(Context(groups, block=16), *case)


@pytest.mark.ranks(2, backend="strict")
@pytest.mark.parametrize(
    "config", [{"mode": "gather", "split": "zigzag"}, {"mode": "ring"}, {"mode": "ulysses"}], ids=str
)
def test_messages_as_nccl_wants_them(config):
    run_cases([config], [TYPICAL[2]])


@pytest.mark.storm
@pytest.mark.ranks(4, backend="strict", timeout=300)
@pytest.mark.parametrize("config", MORE[4], ids=str)
def test_every_message_as_nccl_wants_them(config):
    run_cases([config], TYPICAL)


@pytest.mark.ranks(2)
def test_sinks_and_kernels_of_plain_products():
    for config in MODES[2]:
        with live(config) as groups:
            for kernel in ("auto", "math"):
                compare(Context(groups, kernel=kernel, block=8), *TYPICAL[2], sinks=numbers(4, seed=5))


@pytest.mark.ranks(2)
def test_ranks_of_ulysses_may_share_a_key_head_unevenly():
    with live({"mode": "ulysses"}) as groups:
        compare(Context(groups), *TYPICAL[0][:2], 3, 16, heads=6)  # the second key head's queries are on both ranks


@pytest.mark.ranks(2, backend="strict")
def test_after_the_first_step_the_host_waits_for_nothing():
    for mode in ("gather", "ring", "ulysses"):
        with live({"mode": mode, **({} if mode == "ulysses" else {"split": "balanced"})}) as groups:
            context, sinks = Context(groups, block=4), numbers(4, seed=5)
            parts = (numbers(2, 32, heads, 8, seed=heads) for heads in (4, 2, 2))
            cut, tokens = context.cut(tuple(parts), documents=[[32], [5, 27]])
            q, k, v = (x.detach().requires_grad_() for x in cut)
            for guard in (nullcontext, step):
                with guard():
                    out = context.attention(q, k, v, tokens, mask=Mask(causal=True, window=6), sinks=sinks)
                    context.sum(out.square().sum()).backward()


@pytest.mark.ranks(2)
def test_the_function_alone_takes_one_document():
    with live({"mode": "gather"}) as groups:  # so the communicators of a ring are made by the first call
        q, k, v = (numbers(1, 16, h, 8, seed=h) for h in (4, 2, 2))
        context = Context(groups)
        parts, tokens = context.cut((q, k, v))
        assert tokens == context.static(8)
        for mode in ("ring", "gather"):
            out = context.gather(context_attention(*parts, groups, mode=mode, scale=0.3), tokens)
            expected = attention(q, k, v, Mask(causal=True), tokens, scale=0.3)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)  # sums in another order


class Received(TorchDispatchMode):
    """Counts the elements that all-to-alls bring from other ranks, and what each of them sends and brings."""

    def __init__(self):
        super().__init__()
        self.elements, self.exchanges = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            message, arriving, _, group = args
            own = arriving[dist.get_rank(_torch_private.group_of_name(group))]
            self.elements += (sum(arriving) - own) * math.prod(message.shape[1:])
            self.exchanges += 1
        return func(*args, **(kwargs or {}))


def counted(config, mask, length=32, documents=None, key_heads=2):
    """Elements received in forward and backward of one attention, the mean over ranks, and this rank's exchanges."""
    with live(config) as groups:
        context = Context(groups)
        parts = (numbers(2, length, heads, 8) for heads in (4, key_heads, key_heads))
        (q, k, v), tokens = context.cut(tuple(parts), documents=documents, masks=(mask,))
        with count_collectives() as seen, Received() as exchanged:
            context.attention(q, k, v, tokens, mask=mask).sum().backward()
        total = torch.tensor(exchanged.elements + int(seen.received("recv")))
        dist.all_reduce(total)
        exchanges = torch.tensor([exchanged.exchanges, -exchanged.exchanges])
        dist.all_reduce(exchanges, op=dist.ReduceOp.MAX)
        assert exchanges[0] == -exchanges[1]  # no exchange is missing on one rank
        return total.item() / dist.get_world_size(), int(exchanges[0])


@pytest.mark.ranks([storm(2), 4])
def test_what_travels_is_what_the_formulas_say():
    p, s, b = dist.get_world_size(), 32, 2
    m, h, k, causal = b * s, 32, 16, Mask(causal=True)
    gather = {"mode": "gather", "split": "contiguous", "parts": 2}
    for config, mask, expected in [
        ({"mode": "ring"}, Mask(), 6 * (p - 1) / p * m * k),
        ({"mode": "ring", "split": "contiguous"}, Mask(causal=True, window=5), 6 * (p - 1) / p * (m / p) * k),
        (gather, causal, 6 * b * (p - 1) / (2 * p) * s * k),
        ({**gather, "split": "zigzag"}, causal, 6 * b * 3 * (p - 1) / (4 * p) * s * k),
        (gather, Mask(), 6 * b * (p - 1) / p * s * k),
        ({**gather, "keep": True}, Mask(), 4 * b * (p - 1) / p * s * k),
        ({"mode": "gather", "split": "contiguous"}, Mask(causal=True, window=5), 6 * b * (p - 1) / p * 4 * k),
        ({"mode": "ulysses"}, causal, 4 * (p - 1) / p**2 * m * (h + max(k, 8 * p))),
    ]:
        found, exchanges = counted(config, mask)
        assert found == expected, (config, mask)
        once = 2 if config.get("keep") else 3  # of gather, for each part; so little goes in one, where nobody says
        assert exchanges == {"ring": 0, "ulysses": 4, "gather": once * config.get("parts", 1)}[config["mode"]]
    if p == 4:
        u = r = 2
        found, _ = counted({"mode": "2d", "ulysses": u}, Mask())
        assert found == 4 * (u - 1) / u**2 * (m / r) * (h + k) + 6 * (r - 1) / r * m * k / u


@pytest.mark.ranks(4)
def test_what_travels_is_what_cost_predicts():
    documents, mask = [[20, 1, 3, 8, 32], [64]], Mask(causal=True, window=9)
    for config in MODES[4]:
        sizes = {"ring": 2, "ulysses": 2} if config["mode"] == "2d" else {"sequence": 4}
        cut = config.get("split", "auto")
        shape = AttentionShape(
            tokens=128, width=32, key_width=16, mask=mask, documents=documents, rows=2, heads=4, key_heads=2, split=cut
        )
        keep, outer = config.get("keep", False), config.get("outer", "ring")
        found, _ = counted(config, mask, length=64, documents=documents)
        assert found == received(config["mode"], sizes, shape, keep=keep, outer=outer), config


@pytest.mark.storm  # starts Python anew, which is the point: at its exit modules and groups are torn down
@pytest.mark.ranks(2, init=False)
def test_a_graph_that_is_alive_at_exit_ends_no_process_badly():
    process = subprocess.run([sys.executable, "-c", ALIVE], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.ranks(2)
def test_documents_that_are_whole_on_a_rank_move_nothing():
    for mode in ("gather", "ring"):
        assert counted({"mode": mode, "split": "contiguous"}, Mask(), documents=[16, 16]) == (0, 0)


@pytest.mark.ranks(2)
def test_runs_are_bit_equal_whoever_is_late():
    mask = Mask(causal=True, window=20)
    for config in MODES[2]:
        with live(config) as groups:
            context, results = Context(groups, block=8), []
            for late in (None, 0, 1):
                parts = (numbers(1, 48, heads, 8, dtype=torch.float32) for heads in (4, 2, 2))
                (q, k, v), tokens = context.cut(tuple(parts))
                time.sleep(0.05 * (dist.get_rank() == late))
                out = context.attention(q, k, v, tokens, mask=mask)
                time.sleep(0.05 * (dist.get_rank() == late))
                results.append((out, *torch.autograd.grad(out, (q, k, v), out.detach())))
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.ranks(2)
def test_memory_is_written_before_it_is_read():
    """Torch fills new memory with NaN here: padding, keys that nobody sees, and tokens that see nothing are zero."""
    torch.use_deterministic_algorithms(True)  # the world of a test is its own
    for config in MODES[2]:
        with live(config) as groups:
            for sinks in (None, numbers(4, seed=5)):
                compare(Context(groups, block=16), STEPS, [20, 17], 2, S, sinks=sinks)


class Allocated(TorchDispatchMode):
    """The most elements of new float32 tensors that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.most, self._made = 0, {}

    @property
    def now(self):
        self._made = {key: size for key, size in self._made.items() if not key.expired()}
        return sum(self._made.values()) // 4

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.untyped_storage()._cdata not in given:
                self._made[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        self.most = max(self.most, self.now)
        return result


class WithoutMemory:
    """A kernel whose results take no memory, so that what a mode holds is counted alone. The numbers mean nothing."""

    name, biased, joins = "none", frozenset(), frozenset()
    _zero = torch.zeros(1)

    def forward(self, q, k, v, *, visible, scale):
        return self._zero.expand(*q.shape[:3], v.shape[3]), self._zero.expand(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, gradient, q, k, v, out, lse, *, visible, scale):
        return tuple(self._zero.expand(x.shape) for x in (q, k, v))


HELD = {
    2: [
        {"mode": "ring", "split": "contiguous"},
        {"mode": "gather", "split": "contiguous"},
        {"mode": "gather", "split": "zigzag", "parts": 2},
        {"mode": "gather", "split": "contiguous", "keep": True},
        {"mode": "ulysses"},
    ],
    4: [
        {"mode": "ring", "split": "contiguous"},
        {"mode": "gather", "split": "contiguous"},
        {"mode": "gather", "split": "zigzag", "parts": 2},
        {"mode": "gather", "split": "contiguous", "parts": 4, "keep": True},
        {"mode": "ulysses"},
        {"mode": "2d", "ulysses": 2},
        {"mode": "2d", "ulysses": 2, "outer": "gather"},
    ],
}


def all_to_all_let_go(message, received, sent, group):
    """An exchange that has let go of its message when it returns, as gloo's threads do a little later."""
    arrived = message.new_empty(sum(received), *message.shape[1:])
    with _disable_current_modes():
        copy = torch.empty_like(arrived)
        dist.all_to_all_single(copy, message.clone(), received, sent, group=_torch_private.group_of_name(group))
        arrived.copy_(copy)
    return arrived


EXCHANGES = SimpleNamespace(all_to_all_single=SimpleNamespace(default=all_to_all_let_go))


def held(config, mask, length, rows):
    """The most elements beside this rank's q, k, v, output, log-sum-exp and their gradients: counted, and as said."""
    world, heads, key_heads, head = dist.get_world_size(), 8, 4, 16
    s, none = length // world, WithoutMemory()
    forward, backward = [], []
    with live(config) as groups, pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "choose_kernels", lambda *_: Kernels(none, none))
        for mode in (gather_module, ulysses_module):
            patch.setattr(mode, "functional_collectives", EXCHANGES)
        context = Context(groups)
        q, k, v = (torch.zeros(rows, s, h, head, requires_grad=True) for h in (heads, key_heads, key_heads))
        upstream = torch.zeros(rows, s, heads, head)
        tokens = context.tokens(length, masks=(mask,))
        for _ in range(3):  # after the first time plans are made
            with Allocated() as made:
                out = context.attention(q, k, v, tokens, mask=mask)
                forward.append(made.most)
                made.most = 0
                torch.autograd.grad(out, (q, k, v), upstream)
                backward.append(made.most)
    options = {name: config[name] for name in ("parts", "keep", "outer") if name in config}
    sizes = {"ring": world // 2, "ulysses": 2} if config["mode"] == "2d" else {"sequence": world}
    of = AttentionShape(
        tokens=rows * length,
        width=heads * head,
        key_width=key_heads * head,
        rows=rows,
        mask=mask,
        split=config.get("split", "auto"),
        heads=heads,
        key_heads=key_heads,
    )
    said = attention_memory(config["mode"], sizes, of, **options)
    counted = torch.tensor([min(forward), min(backward)])
    dist.all_reduce(counted, op=dist.ReduceOp.MAX)  # formulas are for the rank with the most
    lse, own = rows * s * heads, q.numel() + 2 * k.numel()
    found = counted - out.numel() - lse
    if "ulysses" in (config["mode"], *config):
        # Gradients by tokens come last, beside those that arrive and those sent, which in 2d are a copy of those by
        # heads; there the gradient of the output by heads is not free yet.
        last = 3 * own if config["mode"] == "ulysses" else 4 * own + q.numel()
        return found.tolist(), [said.forward, max(said.backward, last)], lse
    return [found[0].item(), found[1].item() - own], [said.forward, said.backward], lse


@pytest.mark.ranks([2, pytest.param(4, marks=pytest.mark.storm)])
def test_what_a_mode_holds_is_what_memory_says():
    world = dist.get_world_size()
    for config in HELD[world]:
        for mask, rows in ((Mask(), 2), *([] if config["mode"] in {"ring", "2d"} else [(Mask(causal=True), 1)])):
            found, said, lse = held(config, mask, 128, rows)
            less = [0, 0]
            chunk = 2 * rows * 64 * 4 * 16
            if config["mode"] == "ring" and world == 2:  # after the only hop nothing arrives any more
                less = [0, chunk]
            elif config == {"mode": "2d", "ulysses": 2}:  # its rings have one hop, too, and keys by heads are no copy
                less = [chunk // 2] * 2
            # While pieces are added up a few numbers a token and head are there, too.
            for counted, expected, without in zip(found, said, less, strict=True):
                assert counted - expected + without in range(4 * lse + 1), (config, mask, rows, found, said, lse)


@pytest.mark.ranks(2)
def test_graphs_hold_no_group():
    """A group cannot be pickled; one that a graph holds, and that is alive at exit, ends the process badly."""
    for config in MODES[2]:
        with live(config) as groups:
            context = Context(groups)
            q = numbers(1, 8, 4, 8)
            mixed = context.attention(q, q, q)
            nodes = [context.sum(context.gather(mixed, context.static(8)).sum()).grad_fn]
            held = 0
            for node in nodes:
                nodes += [following for following, _ in node.next_functions if following is not None]
                held += len(pickle.dumps(getattr(node, "__dict__", None))) > 10
            assert held >= 3  # attention, gather and sum


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.storm)], ids=str)
def test_halves_are_about_as_exact_as_torchs_own(dtype):
    """Partial results that meet on their way, in messages too: the error against fp64, beside SDPA's in this dtype."""
    q, k, v = (numbers(1, 256, heads, 32, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    upstream = numbers(1, 256, 4, 32, seed=4, dtype=dtype).detach()

    def torchs(*inputs):
        heads = (x.transpose(1, 2) for x in inputs)
        return functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)

    def with_gradients(run, *inputs):
        out = run(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out.dtype))

    def errors(found):
        return [float((a.double() - b).square().mean().sqrt()) for a, b in zip(found, exact, strict=True)]

    exact = with_gradients(torchs, *(x.detach().double().requires_grad_() for x in (q, k, v)))
    theirs = errors(with_gradients(torchs, q, k, v))
    for config in MODES[4]:
        with live(config) as groups:
            context = Context(groups, block=32)
            parts, tokens = context.cut((q, k, v, upstream))
            *inputs, mine = (x.detach().requires_grad_() for x in parts)
            out = context.attention(*inputs, tokens)
            found = (out.detach(), *torch.autograd.grad(out, inputs, mine.detach()))
            ours = errors([context.gather(x, tokens) for x in found])
            for what, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
                assert a <= 1.5 * b, (config, what, a / b)


def lying(x, how):
    """The same numbers, whose features, heads or tokens are not next to each other in memory."""
    if how == "features and heads":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if how == "features and tokens":
        return x.transpose(1, 3).contiguous().transpose(1, 3)
    if how == "every second feature":
        return torch.stack([x, x], -1)[..., 0]
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.ranks(2)
def test_numbers_may_lie_in_any_order():
    """The CPU's kernel takes features for neighbours, wherever they are."""
    mask, orders = Mask(causal=True, window=20), ("features and heads", "features and tokens", "every second feature")
    for config in MODES[2]:
        with live(config) as groups:
            context = Context(groups, block=16)
            parts = (numbers(2, 48, heads, 8, seed=heads).detach() for heads in (4, 2, 2))
            cut, tokens = context.cut(tuple(parts))
            leaves = [x.requires_grad_() for x in cut]
            out = context.attention(*leaves, tokens, mask=mask)
            expected = (out, *torch.autograd.grad(out, leaves, out.detach()))
            for how in (*orders, "tokens and heads"):
                again = context.attention(*(lying(x, how) for x in leaves), tokens, mask=mask)
                found = (again, *torch.autograd.grad(again, leaves, lying(out.detach(), how)))
                assert all(map(torch.equal, found, expected)), (config, how)


@pytest.mark.ranks(2)
def test_halves_and_autocast():
    with live({"mode": "ring"}) as groups:
        context = Context(groups)
        parts = (numbers(1, 64, heads, 8, seed=heads, dtype=torch.float32) for heads in (4, 2, 2))
        (q, k, v), tokens = context.cut(tuple(parts))
        halves = [x.bfloat16() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16):
            out = context.attention(q, k, v, tokens)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, context.attention(*halves, tokens))


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_autocast_rounds_what_it_is_given_and_nothing_inside(kernel):
    """Products of kernels and gradients of sinks are those of halves without it, also where backward is inside."""
    context, mask, results = Context(None, kernel=kernel), Mask(causal=True, window=9), []
    for is_on in (False, True):
        q, k, v = (numbers(1, 40, heads, 8, seed=heads).bfloat16() for heads in (4, 2, 2))
        sinks = numbers(4, seed=5, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            out = context.attention(q, k, v, mask=mask, sinks=sinks)
            results.append((out, *torch.autograd.grad(out, (q, k, v, sinks), out.detach())))
    assert all(map(torch.equal, *results))


ALIVE = """
import torch
from par_groups import ProcessGroups, Topology, launch
from par_layers import Context

kept = []
with launch() as environment:
    for mode in ("gather", "ring", "ulysses"):
        with ProcessGroups(Topology.from_config({"sequence": {"size": 2, "mode": mode}}, 2)) as groups:
            context = Context(groups)
            q = torch.randn(1, 4, 2, 8, requires_grad=True)
            kept.append(context.sum(context.gather(context.attention(q, q, q), context.static(4)).sum()))
"""
