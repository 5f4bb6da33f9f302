"""The names of torch's experimental module, with its signatures: a program changes an import and nothing else."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch.distributed.tensor.experimental._attention as theirs
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental import _context_parallel
from torch.distributed.tensor.experimental._context_parallel import (
    _attention,
    _cp_custom_ops,
    _load_balancer,
    _sharding_rules,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention.experimental import _paged_attention

from attnspan import torch_compat as ours

PLACES = (theirs, _attention, _cp_custom_ops, _load_balancer, _sharding_rules, _paged_attention)
PAGE = Path(__file__).parents[2] / "docs" / "torch_compat.md"


def defined(module):
    """What a module of torch offers: what it exports, and what it defines."""
    names = set(getattr(module, "__all__", ()))
    for line in ast.parse(inspect.getsource(module)).body:
        if isinstance(line, ast.FunctionDef | ast.ClassDef):
            names.add(line.name)
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names - {"__all__", "_", "aten", "logger"}


def passed_over():
    """The names that the page says are not offered, and why."""
    table = PAGE.read_text().split("## Names that are not here")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert all(reason.strip() for _, _, reason, _ in rows)
    return {name for _, names, _, _ in rows for name in re.findall(r"`(\w+)`", names)}


ASKED = sorted(set().union(*map(defined, PLACES)) & set(ours.__all__))


def torchs(name):
    return next(getattr(place, name) for place in PLACES if hasattr(place, name))


def parameters(function):
    """Name, kind and default of each. Types are not compared: a mesh here may also be a process group."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("place", [experimental, _context_parallel, *PLACES], ids=lambda place: place.__name__)
def test_every_name_of_torchs_is_offered_or_passed_over_with_a_reason(place):
    assert sorted(defined(place) - set(ours.__all__) - passed_over()) == []


def test_twin_a_name_that_is_neither_is_found():
    assert defined(_load_balancer) - (set(ours.__all__) - {"_PTRRLoadBalancer"}) - passed_over() == {
        "_PTRRLoadBalancer"
    }


def test_no_name_is_both_and_none_is_made_up():
    assert not set(ours.__all__) & passed_over()
    assert set(ours.__all__) == set(ASKED)


CLASSES = [name for name in ASKED if inspect.isclass(torchs(name))]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_what_torchs_has(name):
    public = {each for each in vars(torchs(name)) if not each.startswith("__") and each != "_abc_impl"}
    assert sorted(each for each in public if not hasattr(getattr(ours, name), each)) == []


@pytest.mark.parametrize("name", [name for name in ASKED if inspect.isfunction(torchs(name))])
def test_a_function_takes_what_torchs_takes(name):
    mine, theirs = parameters(getattr(ours, name)), parameters(torchs(name))
    if name == "_create_cp_block_mask":  # BLOCK_SIZE came with torch 2.15, and may stand on either side
        mine, theirs = ([each for each in found if each[0] != "BLOCK_SIZE"] for found in (mine, theirs))
    assert mine == theirs


@pytest.mark.parametrize("name", [name for name in ASKED if name.endswith("Balancer")] + ["_ContextParallel"])
def test_a_class_takes_what_torchs_takes(name):
    assert parameters(getattr(ours, name).__init__) == parameters(torchs(name).__init__)


@pytest.mark.parametrize("name", ["_RotateMethod", "_CausalBehavior"])
def test_enums_have_torchs_members(name):
    assert {m.name: m.value for m in getattr(ours, name)} == {m.name: m.value for m in torchs(name)}


def test_attention_types_and_options_are_torchs():
    kinds, torchs_kinds = ours._ContextParallel.AttentionType, theirs._ContextParallel.AttentionType
    assert {m.name: m.value for m in kinds} == {m.name: m.value for m in torchs_kinds}
    assert issubclass(ours._ContextParallel, ParallelStyle)
    plain, theirs_plain = type(ours._cp_options)(), type(theirs._cp_options)()
    assert plain.enable_load_balance == theirs_plain.enable_load_balance
    assert plain.convert_to_f32 == theirs_plain.convert_to_f32
    assert plain.rotate_method.name == theirs_plain.rotate_method.name


@pytest.mark.parametrize("balance", [True, False])
def test_is_causal_behavior_is_torchs(balance, monkeypatch):
    monkeypatch.setattr(ours._cp_options, "enable_load_balance", balance)
    monkeypatch.setattr(theirs._cp_options, "enable_load_balance", balance)
    cases = [(rank, 4, i, causal) for rank in range(4) for i in range(4) for causal in (True, False)]
    assert [ours._is_causal_behavior(*c).name for c in cases] == [theirs._is_causal_behavior(*c).name for c in cases]
