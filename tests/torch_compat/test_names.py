"""The names of torch's experimental module, with its signatures: a program changes an import and nothing else."""

import inspect

import pytest
import torch.distributed.tensor.experimental._attention as theirs
from torch.distributed.tensor.experimental._context_parallel import _attention, _cp_custom_ops, _load_balancer
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention.experimental import _paged_attention

from attnspan import torch_compat as ours

ASKED = [
    "context_parallel",
    "context_parallel_unshard",
    "set_rotate_method",
    "_context_parallel_shard",
    "_ContextParallel",
    "_enable_context_parallel_dispatcher",
    "_disable_context_parallel_dispatcher",
    "_cp_options",
    "_RotateMethod",
    "_CausalBehavior",
    "_is_causal_behavior",
    "_create_cp_block_mask",
    "flex_cp_allgather",
    "flex_cp_allgather_backward",
    "_LoadBalancer",
    "_HeadTailLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer",
    "_PTRRLoadBalancer",
    "_create_default_load_balancer",
    "PagedAttention",
]

PLACES = (theirs, _attention, _cp_custom_ops, _load_balancer, _paged_attention)


def torchs(name):
    return next(getattr(place, name) for place in PLACES if hasattr(place, name))


def parameters(function):
    """Name, kind and default of each. Types are not compared: a mesh here may also be a process group."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_every_name_is_offered():
    assert sorted(ours.__all__) == sorted(ASKED)


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
