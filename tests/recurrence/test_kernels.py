"""Kernels of recurrences: one that is named is taken or raises its reason, and all give what one device gives."""

import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import attnspan as span
from attnspan.layouts import Contiguous, HeadTail
from attnspan.recurrence import fla, fla_laws, fla_package
from attnspan.recurrence.chunked import chunked
from attnspan.recurrence.kernels import KERNELS, chosen
from attnspan.testing import loopback
from tests.recurrence.cases import RULES, Case, distance, normal, of_rank, summed, truth

LENGTHS = [40, 1, 23]
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


class By:
    """A session whose recurrences are computed by a kernel."""

    def __init__(self, cp, kernel):
        self.cp, self.kernel = cp, kernel

    def __getattr__(self, name):
        return getattr(self.cp, name)

    def recurrence(self, *args, **options):
        return self.cp.recurrence(*args, kernel=self.kernel, **options)


def case_of(rule, layout, batch=1, dim=16, **options):
    return Case(rule, layout, sum(LENGTHS), [LENGTHS], batch, groups=1, key_dim=dim, value_dim=2 * dim, **options)


def apart(case, dtype, kernel, device="cpu"):
    """How far a kernel's ranks are from the oracle, by name."""
    ranks = loopback(case.layout.ranks, device, timeout=600)
    found = ranks.run(lambda world: of_rank(case, world, dtype, session=lambda cp: By(cp, kernel)))
    on_cpu = [(out.cpu(), final.cpu(), {name: x.cpu() for name, x in grads.items()}) for out, final, grads in found]
    return distance(summed(case, on_cpu), truth(case))


# ---- the choice ----------------------------------------------------------------------------------------------------


def lightning(dtype=torch.bfloat16, dim=16, **options):
    return span.Lightning(*[torch.ones(1, 4, 1, dim, dtype=dtype)] * 3, **options)


def test_on_a_cpu_it_is_the_chunked_one():
    assert chosen("auto", lightning()).name == chosen("chunked", lightning()).name == "chunked"


def test_auto_takes_the_package_for_half_precision_where_it_can(monkeypatch):
    monkeypatch.setattr(fla.Fla, "refuses", lambda self, rule: None)
    assert chosen("auto", lightning()).name == "fla"
    assert chosen("auto", lightning(torch.float32)).name == "chunked"


def test_one_that_is_named_and_cannot_raises_its_reason_on_every_rank():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=span.Causal())
        with pytest.raises(span.RecurrenceError, match=r"kernel='fla' does not take this Lightning: (it|the package)"):
            cp.recurrence(lightning(), kernel="fla")
        with pytest.raises(span.RecurrenceError, match=r"kernel must be one of auto, chunked, fla, got 'fa'"):
            cp.recurrence(lightning(), kernel="fa")
        affine = span.Affine(lambda x, state: (x, state), [torch.ones(1, 4, 1)], (1, 1))
        with pytest.raises(span.RecurrenceError, match=r"kernel must be 'auto' for Affine, which runs by itself, got"):
            cp.recurrence(affine, kernel="chunked")

    loopback(2).run(rank)


def test_ranks_agree_on_the_kernel(monkeypatch):
    monkeypatch.setattr(fla.Fla, "refuses", lambda self, rule: None)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=span.Causal(), layout=Contiguous(2))
        cp.recurrence(lightning(), kernel="fla" if world.rank else "chunked")

    with pytest.raises(span.ShardError, match="by fla"):
        loopback(2).run(rank)


REFUSED = {
    "float32": (
        {"dtype": torch.float32},
        {},
        "half precision, or float32 as TF32, got float32; use bfloat16, or allow",
    ),
    "float64": ({"dtype": torch.float64}, {}, "half precision, or float32 as TF32, got float64"),
    "a head dim": ({"dim": 24}, {}, "a multiple of 16 up to 256, got K = 24"),
    "a tensor for a scale": ({"scale": torch.ones(())}, {}, "a scale that is a number, got a tensor"),
    "an old GPU": ({}, {"capability": (7, 5)}, "compute capability 8.0 or above"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_is_named(name, monkeypatch):
    given, options, words = REFUSED[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: options.get("capability", (9, 0)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert words in fla._misfit(lightning(**given))
    assert options or fla._misfit(lightning()) is None


@pytest.mark.parametrize(("version", "words"), [(None, "is not installed; pip install"), ("0.5.1", "got 0.5.1; pip")])
def test_another_package_is_refused(version, words, monkeypatch):
    monkeypatch.setattr(fla, "installed", lambda: version)
    assert words in KERNELS["fla"].refuses(lightning())


def test_parts_with_other_arguments_are_refused(monkeypatch):
    monkeypatch.setattr(fla, "installed", lambda: fla.VERSION)
    monkeypatch.setattr(fla, "_misfit", lambda rule: None)
    monkeypatch.setattr(fla_package, "installed", lambda: fla.VERSION)
    monkeypatch.setattr(fla_package, "part", lambda name: lambda q, k: None)
    monkeypatch.setattr(fla.TAKES, "verified", False)
    assert "cannot call fla-core 0.6.0: recurrence/fla_package.py: with this version" in KERNELS["fla"].refuses(
        lightning()
    )


# ---- its glue, with laws in plain torch ------------------------------------------------------------------------------


class PlainLaw(fla_laws.Law):
    """A law of the package's by chunked.py: each chunk of a packed row is one, filled up."""

    def _chunks(self, x):
        starts = self.call.chunks.cu_seqlens.tolist()
        lengths = [stop - start for start, stop in pairwise(starts)]
        size = 1 << (max(lengths) - 1).bit_length()

        def cut(tensor):
            tensor = tensor[0] if tensor.dim() == 4 else tensor[0].unsqueeze(-1)
            parts = [torch.nn.functional.pad(part, (0, 0, 0, 0, 0, size - len(part))) for part in tensor.split(lengths)]
            return torch.stack(parts)

        terms = x._replace(query=x.query * self.call.scale).each(cut)
        heads = terms.value.shape[2]
        query, key = (y.repeat_interleave(heads // y.shape[2], 2) for y in (terms.query, terms.key))
        (reads,), maps = chunked(terms._replace(query=query, key=key))
        return reads, maps, lengths

    def maps(self):
        _, maps, _ = self._chunks(self.x)
        at = self.call.chunks.at
        return fla_laws.LawMaps((), (), maps.a.index_select(0, at), maps.b.index_select(0, at))

    def outputs(self, made, states):
        return self._read(self.x, states.index_select(0, self.call.chunks.order))

    def _read(self, x, states):
        reads, _, lengths = self._chunks(x)
        read = reads.read(states, None)
        return torch.cat([part[:length] for part, length in zip(read, lengths, strict=True)]).unsqueeze(0)

    def _graph(self, states):
        with torch.enable_grad():
            x, states = self.x.each(lambda y: y.detach().requires_grad_()), states.detach().requires_grad_()
            _, maps, _ = self._chunks(x)
            after = maps.a @ states if maps.a.shape[-1] > 1 else maps.a * states
            return x, states, self._read(x, states), after + maps.b

    def state_gradients(self, saved, states, grad):
        _, states, out, _ = self._graph(states)
        return fla_laws.StateGradients(torch.autograd.grad(out, states, grad)[0], ())

    def backward(self, saved, reached, states, grads):
        x, _, out, after = self._graph(states)
        wants = [y for y in x if y is not None]
        found = iter(torch.autograd.grad([out, after], wants, grads))
        return tuple(None if y is None else next(found) for y in x)


ALIKE = ("GatedDelta", "Lightning", "Lightning per token", "SSD")
"""Rules with one decay for all channels, which may be written out."""


@pytest.mark.parametrize(("rule", "wide"), [(rule, False) for rule in RULES] + [(rule, True) for rule in ALIKE])
def test_around_the_package_everything_is_exact(rule, wide, monkeypatch):
    monkeypatch.setattr(fla.Fla, "refuses", lambda self, rule: None)
    monkeypatch.setattr(fla, "law_of", PlainLaw)
    monkeypatch.setattr(fla, "_miscompiled", lambda device: wide)
    monkeypatch.setattr(fla, "SHORTEST", 16)
    for layout, batch in ((Contiguous(1), 1), (HeadTail(2), 2), (Contiguous(3), 1)):
        far = apart(case_of(rule, layout, batch).rounded(torch.float32), torch.float32, "fla")
        for name, found in far.items():
            assert found < (2e-5 if name in ("decay", "A", "D", "dt") else 2e-6), (layout, far)


def test_a_rank_without_tokens_takes_part(monkeypatch):
    monkeypatch.setattr(fla.Fla, "refuses", lambda self, rule: None)
    monkeypatch.setattr(fla, "law_of", PlainLaw)
    for rule in ("GatedDelta", "GLA"):
        case = Case(rule, Contiguous(3), 2, [[2]], 1, groups=1, key_dim=16, value_dim=16).rounded(torch.float32)
        assert max(apart(case, torch.float32, "fla").values()) < 2e-6


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def package():
    """fla-core, whose tuner tries one configuration of each program: which one changes no result."""
    if fla.installed() != fla.VERSION:
        pytest.skip(f"needs fla-core {fla.VERSION}, and {fla.installed() or 'none'} is installed")
    from benchmarks.recurrence_alone import narrowed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever it says of itself when imported
        for name in fla_package.PARTS:
            fla_package.part(name)
    narrowed(1)


@pytest.mark.cuda
@pytest.mark.parametrize("rule", RULES)
def test_the_chunked_one_is_exact_on_cuda(rule):
    far = apart(case_of(rule, HeadTail(2)).rounded(torch.float32), torch.float32, "chunked", "cuda")
    for name, found in far.items():
        assert found < (2e-5 if name in ("decay", "A", "D", "dt") else 2e-6), far


def on_average(case, kernel, dtype):
    """How far a kernel's ranks are from the oracle on CUDA, by name: root mean squares, over those of the oracle."""
    ranks = loopback(case.layout.ranks, "cuda", timeout=600)
    found = ranks.run(lambda world: of_rank(case, world, dtype, session=lambda cp: By(cp, kernel)))
    on_cpu = [(out.cpu(), final.cpu(), {name: x.cpu() for name, x in grads.items()}) for out, final, grads in found]
    (out, final, grads), expected = summed(case, on_cpu), truth(case)
    pairs = {"out": (out, expected[0]), "final": (final, expected[1])}
    pairs |= {name: (grads[name], grad) for name, grad in expected[2].items()}
    return {name: float((a.double() - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


FEW = ("A", "D")
"""Gradients of a few numbers, each a sum over all tokens: their errors are of no average."""


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", RULES)
def test_over_ranks_the_package_errs_as_on_one_device(rule, dtype, package, monkeypatch):
    monkeypatch.setattr(fla, "SHORTEST", 64)  # several chunks on a rank
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as TF32
    try:
        shape = {"groups": 1, "key_dim": 64, "value_dim": 128, "heads": 4}
        layouts = Contiguous(1), HeadTail(2)
        cases = [Case(rule, each, 512, [[300, 1, 211]], 1, **shape).rounded(dtype) for each in layouts]
        alone, ranks = (on_average(case, "fla", dtype) for case in cases)
    finally:
        torch.set_float32_matmul_precision(before)
    least = 1e-5 if dtype == torch.bfloat16 else 5e-4  # a rounding of TF32
    assert max(*alone.values(), *ranks.values()) < 0.03, (alone, ranks)
    for name, found in ranks.items():
        few = name in FEW or (name == "decay" and rule == "Lightning")
        assert found <= (2 if few else 1.1) * alone[name] + least, (name, alone, ranks)


@pytest.mark.cuda
def test_shut_gates_are_finite_in_the_package(package):
    case = case_of("GatedDelta", Contiguous(2), dim=64)
    case.tensors["decay"][normal(*case.tensors["decay"].shape) > 1.0] = -torch.inf
    case = case.rounded(torch.bfloat16)
    tensors = {name: x.to("cuda", torch.bfloat16) for name, x in case.tensors.items()}
    assert chosen("fla", case.call(tensors)).name == "fla"
    expected = truth(case)
    expected[2]["decay"].nan_to_num_()  # the oracle's 0 x inf; the gradient of what is shut is 0
    ranks = loopback(2, "cuda", timeout=600)
    found = ranks.run(lambda world: of_rank(case, world, torch.bfloat16, session=lambda cp: By(cp, "fla")))
    on_cpu = [(out.cpu(), final.cpu(), {name: x.cpu() for name, x in grads.items()}) for out, final, grads in found]
    far = distance(summed(case, on_cpu), expected)
    assert max(far.values()) < 0.03, far


def test_the_extra_installs_the_version_that_is_called():
    assert f'fla = ["fla-core=={fla.VERSION}"]' in PYPROJECT.read_text()
