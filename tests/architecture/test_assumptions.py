"""Where other libraries' insides are leant on: each place proves itself before it is used, and fails closed."""

import contextlib
import importlib
import pkgutil
import re
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint

import attnspan as span
from attnspan import assumptions
from attnspan.assumptions import ALL, Assumption
from attnspan.errors import AttnspanError
from attnspan.testing import loopback
from tests.parallel.models import model, whole

ROOT = Path(span.__file__).parent
LENGTH = 8

for each in pkgutil.walk_packages(span.__path__, "attnspan."):
    if not each.name.endswith(("__main__", "hopper_programs")):
        importlib.import_module(each.name)


@pytest.fixture
def unproven(monkeypatch):
    """Assumptions as in a new process."""
    for each in ALL.values():
        monkeypatch.setattr(each, "verified", False)
    return monkeypatch


@pytest.mark.parametrize("claim", ALL)
def test_every_assumption_holds_with_the_versions_that_are_installed(claim, unproven):
    before = torch.get_rng_state()
    ALL[claim].verify()
    assert ALL[claim].verified
    assert torch.equal(before, torch.get_rng_state())  # a proof draws no random numbers


def test_the_architecture_page_lists_them_all_and_no_others():
    page = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    item = r"^- `([\w/.]+)`: (.+)\n  - internals: .+\n(?:    .+\n)*  - proof: "
    rows = re.findall(item, page, re.MULTILINE)
    own = {claim: each for claim, each in ALL.items() if not claim.startswith("`aten.")}
    assert {(place, claim.strip()) for place, claim in rows} == {(each.place, claim) for claim, each in own.items()}
    assert "`kernels/aten.py`" in page  # one row for all private ops
    assert all((ROOT / each.place).is_file() for each in ALL.values())


def test_private_ops_are_called_through_their_schemas_alone():
    """`torch.ops.aten._...` elsewhere would be an op that nobody has compared."""
    found = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in ROOT.rglob("*.py")
        for name in re.findall(r"torch\.ops\.aten\.(_\w+)", path.read_text())
    ]
    assert [each for each in found if each != ("masks/graphs.py", "_to_copy")] == []


# ---- what an assumption does -----------------------------------------------------------------------------------------


@pytest.fixture
def claimed():
    made = []

    def claim(check):
        made.append(Assumption(f"a test is right {len(made)}", "errors.py", "nothing", check))
        return made[-1]

    yield claim
    for each in made:
        del assumptions.ALL[each.claim]


def test_a_check_runs_once_in_a_thread_of_its_own_and_a_no_is_never_remembered_as_a_yes(claimed):
    asked, answers = [], [False, None, 1, True]
    it = claimed(lambda: asked.append(threading.current_thread()) or answers[len(asked) - 1])
    for _ in range(3):  # only True is a yes
        with pytest.raises(AttnspanError, match=r"errors.py: with this version of torch it does not hold that a test"):
            it.verify()
    it.verify()
    it.verify()
    assert len(asked) == 4
    assert threading.current_thread() not in asked


def test_whatever_a_check_raises_is_a_no(claimed):
    with pytest.raises(AttnspanError, match=r"AttributeError: moved"):
        claimed(lambda: (_ for _ in ()).throw(AttributeError("moved"))).verify()


def test_threads_that_ask_at_once_wait_for_one_check(claimed):
    asked = []
    it = claimed(lambda: asked.append(1) is None)
    threads = [threading.Thread(target=it.verify) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert asked == [1]


# ---- insides that have moved -----------------------------------------------------------------------------------------


def renamed(function, old, new):
    """The function with a local name changed, as a later version of its library may have it."""
    code = function.__code__
    names = {field: tuple(new if x == old else x for x in getattr(code, field)) for field in FIELDS}
    changed = types.FunctionType(code.replace(**names), function.__globals__, function.__name__, function.__defaults__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


FIELDS = ("co_varnames", "co_cellvars", "co_freevars")


def moved_file(monkeypatch):
    monkeypatch.setattr("attnspan.parallel.checkpoint_regions.CHECKPOINTS", "elsewhere.py")


def moved_local(monkeypatch):
    theirs = torch.utils.checkpoint
    name = next(name for name in ("_checkpoint_impl", "checkpoint") if hasattr(theirs, name))  # 2.15 has both
    inner = getattr(theirs, name)
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    monkeypatch.setattr(theirs, name, renamed(inner, "gen", "generator"))


def moved_frame(monkeypatch):
    monkeypatch.setattr("attnspan.parallel.checkpoint_regions._frame_of", lambda generator: None)


def moved_rerun(monkeypatch):
    monkeypatch.setattr("attnspan.parallel.checkpoint_regions._rerun_attribute", lambda region: None)


CHECKPOINTING = [moved_file, moved_local, moved_frame, moved_rerun]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("moved", CHECKPOINTING)
def test_checkpointing_that_is_not_seen_refuses_attention_and_is_never_wrong_in_silence(unproven, moved, reentrant):
    moved(unproven)

    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal()), model()
        shard = cp.shard(whole(LENGTH)).requires_grad_()
        with pytest.raises(AttnspanError, match="does not hold that checkpointed regions are seen in both runs"):
            run_checkpointed(cp, mine, shard, reentrant)
        with cp.attach(mine), pytest.raises(AttnspanError, match="checkpointed regions are seen"):
            checkpoint(mine, shard, use_reentrant=reentrant)
        assert cp.report().calls == 0

    loopback(2).run(rank)


def run_checkpointed(cp, mine, shard, reentrant):
    with cp.sdpa():
        checkpoint(mine, shard, use_reentrant=reentrant)


MOVED = {
    "a call of flex_attention reaches": lambda m: m.setattr(torch._C, "_len_torch_function_stack", lambda: 0),
    "a torch function mode sees": lambda m: m.setattr("attnspan.parallel.multihead.NEED_WEIGHTS", 14),
    "the module that is called": lambda m: m.setattr("attnspan.parallel.attached_forward.MODULES", "elsewhere.py"),
    "torch.func's tensors": lambda m: m.setattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda x: False),
    "code that runs in backward": lambda m: m.setattr(torch._C, "_current_graph_task_id", lambda: 0),
    "`aten._scaled_dot_product_flash_attention_for_cpu` has": lambda m: m.setattr(
        "attnspan.kernels.aten.CPU_FLASH.arguments", ["query", "value", "key"]
    ),
}


@pytest.mark.parametrize("claim", MOVED)
def test_attention_in_an_attached_model_refuses_where_insides_have_moved(unproven, claim):
    MOVED[claim](unproven)

    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal(), kernel="cpu_flash"), model()
        with pytest.raises(AttnspanError, match=f"it does not hold that {re.escape(claim)}"):
            attached(cp, mine)

    loopback(1).run(rank)


def attached(cp, mine):
    with cp.attach(mine, flex=True):
        mine(cp.shard(whole(LENGTH)))


def test_programs_refuse_where_autograd_does_not_come_back(unproven):
    unproven.setattr("attnspan.kernels.autograd._autograd_back", contextlib.nullcontext)
    with pytest.raises(AttnspanError, match="autograd can be switched on inside a custom op"):
        ALL["autograd can be switched on inside a custom op"].verify()


def test_versions_that_do_not_count_are_refused(unproven):
    from attnspan.masks.versions import version_of

    class Still(torch.Tensor):
        _version = 0

    unproven.setattr(torch, "zeros", lambda *size, **options: F.pad(torch.ones(0), (0, 2)).as_subclass(Still))
    with pytest.raises(AttnspanError, match="a write in place raises the version of a tensor"):
        version_of(torch.ones(1))


def test_masks_of_transformers_that_mean_something_else_are_refused(unproven):
    masking = pytest.importorskip("attnspan.integrations.huggingface.masking")
    wider = masking.sliding_window_overlay
    unproven.setattr(masking, "sliding_window_overlay", lambda size: wider(size + 1))
    with pytest.raises(AttnspanError, match="this version of transformers it does not hold that functions of masks"):
        masking._read(masking.causal_mask_function)


def test_a_trainer_that_counts_otherwise_is_refused(unproven):
    """Trainer of transformers 5.17 does not divide its count by the ranks of a batch: losses would be halved."""
    training = pytest.importorskip("attnspan.integrations.huggingface.training")
    unproven.setattr(training.Trainer, "_get_num_items_in_batch", lambda *args: torch.tensor(6))
    trainer = types.SimpleNamespace(
        label_smoother=None, compute_loss_func=None, args=types.SimpleNamespace(neftune_noise_alpha=None)
    )
    with pytest.raises(AttnspanError, match="does not hold that Trainer divides its count of tokens by the ranks"):
        training.SpanTrainerMixin.compute_loss(trainer, torch.nn.Linear(1, 1), {}, num_items_in_batch=6)
