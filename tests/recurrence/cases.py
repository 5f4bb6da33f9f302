"""Random recurrences: a layout, documents and tensors of every rule; what ranks make of them, and the oracle.

A case is run whole: outputs, final states and the gradients of all tensors, for one random loss that all of these are
in. Gradients of ranks are summed, as the loss is the sum of what the ranks compute.
"""

from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st

import attnspan as span
from attnspan.layouts import Layout
from attnspan.testing import loopback
from tests.layouts.strategies import layouts, lengths_of
from tests.parallel.cases import balanced_rows, listed
from tests.recurrence import oracle

RULES = ["GatedDelta", "DeltaNet", "KDA", "GLA", "Lightning", "Lightning per token", "Linear", "SSD", "SSD without D"]


def normal(*shape, seed=0, dtype=torch.float64):
    """Random numbers drawn on the CPU, the same ones whatever the default device; `devices.here` moves them to it."""
    random = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=dtype, device="cpu")


@dataclass(frozen=True)
class Case:
    """A rule on whole tensors in float64, a layout, and the documents of each batch row."""

    rule: str
    layout: Layout
    seq_len: int
    lengths: list[list[int]]  # one list if all rows are packed alike
    batch: int
    heads: int = 2
    groups: int = 1
    key_dim: int = 3
    value_dim: int = 2
    initial: bool = True
    seed: int = 0
    tensors: dict = field(init=False)
    states: torch.Tensor | None = field(init=False)

    def __post_init__(self):
        random = torch.Generator("cpu").manual_seed(self.seed)
        make = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64, device="cpu")  # noqa: E731
        tokens, h, g, k, v = (self.batch, self.seq_len), self.heads, self.groups, self.key_dim, self.value_dim
        gate = lambda *shape: -make(*shape).exp() * 0.3  # noqa: E731
        if self.rule.startswith("SSD"):
            tensors = {"x": make(*tokens, h, v), "dt": make(*tokens, h).exp() * 0.5, "A": gate(h)}
            tensors |= {"B": make(*tokens, g, k), "C": make(*tokens, g, k)}
            tensors |= {"D": make(h)} if self.rule == "SSD" else {}
        else:
            key = torch.nn.functional.normalize(make(*tokens, g, k), dim=-1)
            tensors = {"query": make(*tokens, g, k), "key": key, "value": make(*tokens, h, v)}
            shapes = {"KDA": (*tokens, h, k), "GLA": (*tokens, h, k), "Lightning": (h,)}
            if self.rule in shapes or self.rule in ("GatedDelta", "Lightning per token"):
                tensors["decay"] = gate(*shapes.get(self.rule, (*tokens, h)))
            if self.rule in ("GatedDelta", "DeltaNet", "KDA"):
                tensors["beta"] = torch.sigmoid(make(*tokens, h)) * 1.5
        object.__setattr__(self, "tensors", tensors)
        state = (h, v, k) if self.rule.startswith("SSD") else (h, k, v)
        object.__setattr__(self, "states", make(len(self.rows_of_documents), *state) if self.initial else None)

    def rounded(self, dtype):
        """The same with numbers that a dtype has: what is then measured is rounding on the way, not of inputs."""
        other = replace(self)
        object.__setattr__(other, "tensors", {name: x.to(dtype).double() for name, x in self.tensors.items()})
        object.__setattr__(other, "states", None if self.states is None else self.states.to(dtype).double())
        return other

    @property
    def all_lengths(self):
        return self.lengths if len(self.lengths) > 1 else self.lengths * self.batch

    @property
    def rows_of_documents(self):
        return list(oracle.documents(self.all_lengths))

    @property
    def mask(self):
        return span.Causal() & span.Documents(self.lengths if len(self.lengths) > 1 else self.lengths[0])

    def call(self, tensors):
        """The rule of some tensors."""
        kind = {"DeltaNet": "GatedDelta", "Lightning per token": "Lightning", "Linear": "Lightning"}.get(
            self.rule, self.rule.split()[0]
        )
        rest = {"decay": None} if self.rule == "DeltaNet" else {}
        return getattr(span, kind)(**tensors, **rest)

    def expected(self, tensors, states):
        """Outputs and final states by the oracle."""
        shape = (len(self.rows_of_documents), self.heads, self.key_dim, self.value_dim)
        if self.rule.startswith("SSD"):
            shape = (*shape[:2], self.value_dim, self.key_dim)
        begin = torch.zeros(shape, dtype=torch.float64) if states is None else states
        named = tensors.get
        if self.rule.startswith("SSD"):
            return oracle.ssd(*(named(name) for name in ("x", "dt", "A", "B", "C", "D")), self.all_lengths, begin)
        names = ("query", "key", "value", "decay", "beta")
        return oracle.attending(*(named(name) for name in names), self.key_dim**-0.5, self.all_lengths, begin)

    def leaves(self, dtype=torch.float64, device="cpu"):
        """Fresh tensors and states that gradients are asked of."""
        tensors = {name: x.to(device, dtype, copy=True).requires_grad_() for name, x in self.tensors.items()}
        return tensors, None if self.states is None else self.states.to(device, dtype, copy=True).requires_grad_()

    def weights(self, out, final):
        """What the loss multiplies outputs and final states by."""
        random = torch.Generator("cpu").manual_seed(self.seed + 1)
        drawn = [torch.randn(x.shape, generator=random, dtype=torch.float64, device="cpu") for x in (out, final)]
        return [x.to(final.device) for x in drawn]


@st.composite
def cases(draw, rules=RULES, most=40):
    """Any layout of 1 to 8 ranks, any documents, any rule, short and long sequences."""
    seq_len = draw(st.sampled_from([1, 2, 7, 13, 31, most]) | st.integers(1, most))
    batch, packed_alike = draw(st.integers(1, 2)), draw(st.booleans())
    lengths = [draw(lengths_of(seq_len)) for _ in range(1 if packed_alike else batch)]
    kinds = [layouts(seq_len, draw(st.integers(1, 8))).filter(lambda x: x.rows == 1), listed(seq_len, 1)]
    if batch > 1:
        kinds += [listed(seq_len, batch), balanced_rows(seq_len, batch)]
    shape = {"heads": draw(st.sampled_from([1, 2, 4])), "key_dim": draw(st.sampled_from([1, 3]))}
    shape["groups"] = draw(st.sampled_from([g for g in (1, 2) if shape["heads"] % g == 0]))
    rest = {"initial": draw(st.booleans()), "seed": draw(st.integers(0, 10**6))}
    return Case(draw(st.sampled_from(rules)), draw(st.one_of(*kinds)), seq_len, lengths, batch, **shape, **rest)


def truth(case):
    """The oracle's outputs, final states, and gradients by name."""
    tensors, states = case.leaves()
    out, final = case.expected(tensors, states)
    wants = dict(tensors) if states is None else {**tensors, "initial": states}
    weights = case.weights(out, final)
    loss = (out * weights[0]).sum() + (final * weights[1]).sum()
    grads = torch.autograd.grad(loss, list(wants.values()), allow_unused=True)
    none = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wants.values(), grads, strict=True)]
    return out.detach(), final.detach(), dict(zip(wants, none, strict=True))


def on_ranks(case, dtype=torch.float64, wrap=lambda world: world, session=lambda cp: cp):
    """The same by ranks."""

    def rank(world):
        return of_rank(case, wrap(world), dtype, session)

    return summed(case, loopback(case.layout.ranks).run(rank))


def of_rank(case, world, dtype=torch.float64, session=lambda cp: cp):
    """What one rank computes: its output, the final states, and its part of the gradients."""
    cp = session(span.ContextParallel(world, seq_len=case.seq_len, mask=case.mask, layout=case.layout))
    tensors, states = case.leaves(dtype, cp.transport.device)
    mine = {name: x if x.dim() == 1 else cp.shard(x) for name, x in tensors.items()}
    out, final = cp.recurrence(case.call(mine), initial_state=states, return_final_state=True)
    shape = (case.batch, case.seq_len, *out.shape[2:])
    weights = case.weights(torch.empty(shape), final)
    loss = (out.double() * cp.shard(weights[0])).sum() + (final.double() * weights[1]).sum() / cp.ranks
    wants = dict(tensors) if states is None else {**tensors, "initial": states}
    grads = torch.autograd.grad(loss, list(wants.values()), allow_unused=True)
    none = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wants.values(), grads, strict=True)]
    return cp.unshard(out.detach()), final.detach(), dict(zip(wants, none, strict=True))


def summed(case, found):
    """One result of all ranks': every rank has the same outputs and states, and a part of the gradients."""
    out, final, _ = found[0]
    for other in found[1:]:
        assert torch.equal(other[0], out)
        assert torch.equal(other[1], final)
    return out, final, {name: sum(each[2][name].double() for each in found) for name in found[0][2]}


def distance(found, expected):
    """By name: how far apart two results are, as a part of the largest number there."""
    pairs = {"out": (found[0], expected[0]), "final": (found[1], expected[1])}
    pairs |= {name: (found[2][name], grad) for name, grad in expected[2].items()}
    return {name: float((a.double() - b).abs().max() / b.abs().max().clamp_min(1)) for name, (a, b) in pairs.items()}
