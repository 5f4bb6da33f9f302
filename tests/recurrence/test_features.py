"""Recurrences under what training does to them: half precision, autocast, checkpointing, torch.compile, other devices'
wires, gates that are shut, and gradients of some tensors only."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnspan as span
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.testing import loopback
from tests.processes import on_backends, spawn
from tests.recurrence.cases import RULES, Case, distance, normal, of_rank, on_ranks, summed, truth
from tests.recurrence.test_affine import AsFunction

LENGTHS = [9, 1, 20, 11]


def packed(rule, layout, **options):
    return Case(rule, layout, 41, [LENGTHS], 2, heads=2, groups=1, key_dim=3, **options)


# ---- real processes ------------------------------------------------------------------------------------------------


def each_rule(ranks):
    """Every rule on its own layout; the last one a function."""
    layouts = [Contiguous(ranks), HeadTail(ranks), Striped(ranks, chunk=5)]
    found = {rule: packed(rule, layouts[i % 3]) for i, rule in enumerate(RULES)}
    rows = [[9, 20, 12], [41]]
    balanced = Balanced(span.Causal() & span.Documents(rows), ranks=ranks, chunk=4, per_row=True)
    found["rows of their own"] = Case("GatedDelta", balanced, 41, rows, 2)
    found["fewer tokens than ranks"] = Case("KDA", Contiguous(ranks), ranks - 1, [[ranks - 1]], 1)
    found["a function"] = AsFunction("GatedDelta", HeadTail(ranks), 13, [[6, 7]], 1, groups=2)
    return found


def live(world):
    """One process: every case, and a convolution."""
    found = {name: of_rank(case, world) for name, case in each_rule(world.ranks).items()}
    cp = span.ContextParallel(world, seq_len=41, mask=span.Documents(LENGTHS), layout=HeadTail(world.ranks))
    whole = torch.arange(41.0 * 2, dtype=torch.float64).view(1, 41, 2).requires_grad_()
    out = cp.conv1d(cp.shard(whole), torch.ones(2, 4, dtype=torch.float64))
    (out * cp.shard(whole.detach())).sum().backward()
    return found | {"conv1d": (cp.unshard(out.detach()), whole.grad)}


@on_backends(3)
def test_every_rule_runs_on_real_processes(ranks, backend):
    found = spawn(ranks, live, backend=backend)
    for name, case in each_rule(ranks).items():
        apart = distance(summed(case, [each[name] for each in found]), truth(case))
        assert max(apart.values()) < 1e-9, (name, apart)
    whole = torch.arange(41.0 * 2, dtype=torch.float64).view(1, 41, 2).requires_grad_()
    parts = [torch.nn.functional.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1).sum(-1) for x in whole.split(LENGTHS, 1)]
    (torch.cat(parts, 1) * whole.detach()).sum().backward()
    assert torch.equal(found[0]["conv1d"][0], torch.cat(parts, 1).detach())
    assert torch.equal(sum(each["conv1d"][1] for each in found), whole.grad)


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_in_bfloat16_ranks_round_as_one_device_does(rule):
    case = packed(rule, HeadTail(4), seed=7).rounded(torch.bfloat16)
    alone = packed(rule, Contiguous(1), seed=7).rounded(torch.bfloat16)
    expected = truth(case)
    here, there = (distance(on_ranks(each, torch.bfloat16), expected) for each in (alone, case))
    for name in ("out", "final"):
        assert there[name] <= 1.1 * here[name] + 1e-6, (name, here, there)
    assert max(there.values()) < 0.02


@pytest.mark.parametrize("rule", ["GatedDelta", "KDA", "GLA", "Lightning per token"])
def test_shut_gates_and_strong_decays_are_exact_in_float32(rule):
    case = packed(rule, HeadTail(3), seed=3)
    decay = case.tensors["decay"]
    drawn = normal(*decay.shape, seed=4)
    decay[drawn < -0.8] = -300.0  # a prefix sum would lose five digits of what follows
    decay[drawn > 1.3] = -torch.inf
    expected = truth(case)
    expected[2]["decay"].nan_to_num_()  # the oracle's 0 x inf; the gradient of what is shut is 0
    apart = distance(on_ranks(case, torch.float32), expected)
    assert max(apart.values()) < 2e-6, apart


def test_autocast_computes_states_in_float32():
    case = packed("GatedDelta", Contiguous(2))

    class Casting:
        """A session that is called inside of autocast."""

        def __init__(self, cp):
            self.cp = cp

        def __getattr__(self, name):
            return getattr(self.cp, name)

        def recurrence(self, *args, **options):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.cp.recurrence(*args, **options)

    apart = distance(on_ranks(case, torch.float32, session=Casting), truth(case))
    assert max(apart.values()) < 2e-6, apart


@pytest.mark.parametrize("wanted", ["query", "value", "decay", "beta", "initial"])
def test_gradients_may_be_asked_of_one_tensor(wanted):
    case = packed("GatedDelta", HeadTail(3))
    _, _, grads = truth(case)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=41, mask=case.mask, layout=case.layout)
        tensors, states = case.leaves()
        for name, x in {**tensors, "initial": states}.items():
            x.requires_grad_(name == wanted)
        mine = {name: cp.shard(x) for name, x in tensors.items()}
        out, final = cp.recurrence(case.call(mine), initial_state=states, return_final_state=True)
        weights = case.weights(torch.empty(2, 41, 2, 2), final)
        ((out * cp.shard(weights[0])).sum() + (final * weights[1]).sum() / cp.ranks).backward()
        return {**tensors, "initial": states}[wanted].grad

    torch.testing.assert_close(sum(loopback(3).run(rank)), grads[wanted], rtol=0, atol=1e-10)


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@pytest.mark.parametrize("how", ["reentrant", "replayed", "compiled"])
def test_checkpointed_or_compiled_it_is_the_same(how):
    case = packed("GatedDelta", HeadTail(3), initial=False)
    _, _, grads = truth(case)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=41, mask=case.mask, layout=case.layout)
        tensors, _ = case.leaves()

        def layer(*tensors):
            named = dict(zip(case.tensors, tensors, strict=True))
            key = cp.conv1d(named["key"].flatten(2), torch.tensor([[0.0, 1.0]] * 3, dtype=torch.float64))
            named["key"] = key.unflatten(2, (1, 3)) * 1.0
            return cp.recurrence(case.call(named), return_final_state=True)

        mine = [cp.shard(x) for x in tensors.values()]
        if how == "compiled":
            out, final = torch.compile(layer, backend="eager")(*mine)
        else:
            out, final = checkpoint(layer, *mine, use_reentrant=how == "reentrant")
        weights = case.weights(torch.empty(2, 41, 2, 2), final)
        ((out * cp.shard(weights[0])).sum() + (final * weights[1]).sum() / cp.ranks).backward()
        return [x.grad for x in tensors.values()]

    found = [sum(parts) for parts in zip(*loopback(3).run(rank), strict=True)]
    for name, grad in zip(case.tensors, found, strict=True):
        torch.testing.assert_close(grad, grads[name], rtol=0, atol=1e-10)


def test_attention_and_recurrence_share_a_session_and_its_layout():
    lengths, x = [20, 44], normal(1, 64, 2, 8)
    decay = -normal(1, 64, 2, seed=1).sigmoid()

    def rank(world):
        cp = span.ContextParallel(world, seq_len=64, mask=span.Causal() & span.Documents(lengths))
        own = cp.shard(x)
        attended = cp.attention(*[own.transpose(1, 2)] * 3).transpose(1, 2)
        out = cp.unshard(cp.recurrence(span.Lightning(own, own, attended, cp.shard(decay))))
        cp.assert_used(layers=1)
        return out, cp.report().recurrences["Lightning"].calls

    alone, together = loopback(1).run(rank)[0], loopback(4).run(rank)[0]
    torch.testing.assert_close(together[0], alone[0], rtol=0, atol=1e-10)
    assert together[1] == 1


def test_calls_in_another_order_are_told_apart():
    case = packed("GatedDelta", Contiguous(2), initial=False)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=41, mask=span.Causal(), layout=case.layout)
        tensors = {name: cp.shard(x) for name, x in case.leaves()[0].items()}
        first, second = case.call(tensors), case.call({**tensors, "query": tensors["query"].float()})
        for rule in (first, second):  # agreed on
            cp.recurrence(rule)
        for rule in (first, second) if world.rank else (second, first):
            cp.recurrence(rule)

    with pytest.raises(span.TransportError, match=r"ranks are out of step: .* recurrence GatedDelta of B=2"):
        loopback(2).run(rank)


def test_second_derivatives_are_refused():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=4, mask=span.Causal())
        x = torch.ones(1, 4, 1, 2, requires_grad=True)
        out = cp.recurrence(span.Lightning(x, x, x))
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    loopback(1).run(rank)
