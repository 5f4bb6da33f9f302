"""``check_model``: compares a model on one device with the same model over ranks, and finds where they first differ.

The model runs twice with the same weights: dense, on one device, with torch's own operations; and context parallel, on
a mesh or on virtual ranks in this process. Loss, logits and the gradient of every parameter (averaged over ranks) are
compared, and the inputs and outputs of every module, which locates a mistake:

    in a module whose inputs agree and whose output does not;
    if every module agrees and the loss does not, in the labels or in the averaging of the loss.

dense_attention.py is the dense side, comparison.py compares the two.

Tensors that no module takes or returns are not compared. Models run in eval mode, because dropout would differ.
Everything is in memory at once, and the dense run holds S x S masks: use small sizes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from attnspan.attention.latent import EXPANDING
from attnspan.dtypes import lse_dtype
from attnspan.errors import AttentionError
from attnspan.layouts import Layout
from attnspan.parallel.attached_forward import is_attached
from attnspan.parallel.batch import IGNORED
from attnspan.parallel.comparison import Comparison, Difference, ModuleCall, gradient_errors, severity
from attnspan.parallel.dense_attention import one_device
from attnspan.parallel.session import ContextParallel
from attnspan.parallel.session_spec import Masks
from attnspan.plan import Strategy
from attnspan.plan.drawing import table
from attnspan.transports.group import Group
from attnspan.transports.loopback import Loopback

Forward = Callable[[nn.Module, Any, ContextParallel], object]
"""(model, whole batch, session) -> logits, loss, (loss, logits), or an object or a dict with `loss` or `logits`."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By the dtype of the parameters. A mistake is rarely smaller than 1e-2; rounding grows with depth."""


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """What `check_model` found. Prints as a table; `ok` says whether everything agrees."""

    ranks: int
    tolerance: float
    errors: Mapping[str, float]  # of the loss, of logits, and of every gradient by its parameter's name
    calls: int  # of attention, through the session, on each rank
    first: Difference | None  # the first module that differs
    hints: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether loss, logits, all gradients and all modules agree."""
        return self.first is None and all(error <= self.tolerance for error in self.errors.values())

    def raise_if_wrong(self) -> None:
        """Raise what is wrong."""
        if not self.ok:
            raise AttentionError(f"the model is not the same on {self.ranks} ranks as on one device\n{self}")

    def __str__(self) -> str:
        gradients = {name: error for name, error in self.errors.items() if name not in ("loss", "logits")}
        lines = [
            [name, f"{self.errors[name]:.1e}", self._verdict(name)]
            for name in ("loss", "logits")
            if name in self.errors
        ]
        if gradients:
            worst = max(gradients, key=lambda name: severity(gradients[name]))
            wrong = sum(not error <= self.tolerance for error in gradients.values())
            verdict = f"{wrong} of {len(gradients)} differ, most {worst}" if wrong else f"all {len(gradients)} agree"
            lines.append(["gradients", f"{gradients[worst]:.1e}", verdict])
        said = [
            f"{self.ranks} ranks beside one device, tolerance {self.tolerance:.0e}, {self.calls} calls of attention"
        ]
        said.append(table(["", "error", ""], lines))
        if self.first is not None:
            said.append(f"first difference in {self.first}")
        return "\n".join([*said, *self.hints])

    def _verdict(self, name: str) -> str:
        return "agrees" if self.errors[name] <= self.tolerance else "differs"


def check_model(
    model: nn.Module,
    batch: object,
    *,
    mask: Masks,
    seq_len: int | None = None,
    forward: Forward | None = None,
    mesh: Group = None,
    ranks: int = 2,
    layout: Layout | str = "auto",
    strategy: Strategy | str = "auto",
    tolerance: float | None = None,
    raises: bool = False,
) -> ModelCheck:
    """Run a model on one device and context parallel, and compare loss, logits, gradients and every module.

    `batch` is whole, the same on every rank. `forward(model, batch, cp)` is one training step's forward as the script
    does it: shard the batch, run the model, return the loss, the logits or both; it runs with a session of one rank
    for the dense side. Without it, tensors of the batch are sharded along their dim of `seq_len` tokens, the model is
    called with ``cp.attach(model, flex=True)``, with `position_ids` or `positions` if it takes them and the batch has
    none, and `labels` of a dict, unshifted as transformers has them, make the loss. On `mesh` every rank calls this;
    without, `ranks` are virtual and each has a copy of the model. `raises` raises what is found wrong.

    >>> import attnspan as span
    >>> layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
    >>> print(check_model(layer, torch.randn(1, 12, 16), mask=span.Full()).ok)
    True
    """
    length = _length(batch) if seq_len is None else seq_len
    if any(is_attached(module) for module in model.modules()):
        raise AttentionError("check_model: the model is attached already, detach() it first; `forward` may attach it")
    run = ModelRun(model, batch, forward or _default, length, mask, _tolerance(model, tolerance))

    def on(group: Group) -> ModelCheck:
        session = ContextParallel(group, seq_len=length, mask=mask, layout=layout, strategy=strategy)
        return run.beside(dense, session)

    dense = run.dense()
    found = Loopback(ranks, _device(model)).run(on)[0] if mesh is None else on(mesh)
    if raises:
        found.raise_if_wrong()
    return found


# ---- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunTrace:
    """Everything that a run leaves to compare. Modules are in the order in which they returned."""

    loss: Tensor
    logits: Tensor | None
    gradients: dict[str, Tensor | None]
    passed: list[ModuleCall]


@dataclass(frozen=True, slots=True)
class ModelRun:
    """A model and a batch, to be run on one device and on ranks."""

    model: nn.Module
    batch: object
    forward: Forward
    seq_len: int
    mask: Masks
    tolerance: float

    def dense(self) -> RunTrace:
        """On one device, with torch's own operations."""
        return Loopback(1, _device(self.model)).run(
            lambda world: self._trace(one_device(world, self.seq_len, self.mask))
        )[0]

    def beside(self, dense: RunTrace, session: ContextParallel) -> ModelCheck:
        """On the ranks of a session, compared with the dense run; the same on every rank."""
        ours = self._trace(session)
        beside = Comparison(session, self.tolerance)
        errors = {"loss": beside.loss(ours.loss, dense.loss)}
        if ours.logits is not None and dense.logits is not None:
            errors["logits"] = beside.error(ours.logits, dense.logits)
        errors |= gradient_errors(ours.gradients, dense.gradients)
        first = beside.first(ours.passed, dense.passed)
        errors, first, alike = beside.agreed(errors, first, float(ours.loss))
        calls = session.report().calls
        hints = _hints(errors, first, calls, self.tolerance, alike)
        return ModelCheck(session.ranks, self.tolerance, errors, calls, first, hints)

    def _trace(self, session: ContextParallel) -> RunTrace:
        model = copy.deepcopy(self.model).eval()
        model.zero_grad(set_to_none=True)
        with torch.enable_grad(), _watching(model) as passed:
            loss, logits = _loss_and_logits(self.forward(model, self.batch, session), session)
        loss.backward()
        session.average_gradients(model)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        return RunTrace(loss.detach(), None if logits is None else logits.detach(), gradients, passed)


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[ModuleCall]]:
    passed: list[ModuleCall] = []

    def note(name: str, _: nn.Module, args: object, kwargs: object, output: object) -> None:
        if not EXPANDING.get():
            passed.append(ModuleCall(name, _tensors((args, kwargs)), _tensors(output)))

    handles = [
        module.register_forward_hook(functools.partial(note, name or type(model).__name__), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield passed
    finally:
        for handle in handles:
            handle.remove()


def _tensors(tree: object) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(_opened(tree)) if isinstance(leaf, Tensor)]


def _opened(tree: object) -> object:
    """Model outputs of transformers are mappings that pytree may not know."""
    return dict(tree) if isinstance(tree, Mapping) else tree


# ---- the forward that is run if none is given ----------------------------------------------------------------------


def _default(model: nn.Module, batch: object, cp: ContextParallel) -> object:
    parts = _sharded(batch, cp)
    labels = parts.pop("labels", None) if isinstance(parts, dict) else None
    with cp.attach(model, flex=True):
        if isinstance(parts, dict):
            out = model(**parts, **_positions(model, parts, cp))
        else:
            args = parts if isinstance(parts, tuple) else (parts,)
            out = model(*args, **_positions(model, {}, cp))
    if labels is None:
        return out
    logits, targets = _logits(out), cp.shift(labels, by=-1, fill=IGNORED)
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return cp.mean_loss(each.view_as(targets), targets != IGNORED), logits


def _sharded(batch: object, cp: ContextParallel) -> object:
    """A batch with each tensor cut along its first dim of `seq_len` tokens, except the outermost if it has more."""
    if isinstance(batch, Mapping):
        return {name: _sharded(value, cp) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(_sharded(value, cp) for value in batch)
    if not isinstance(batch, Tensor):
        return batch
    dims = [dim for dim in range(1 if batch.dim() > 1 else 0, batch.dim()) if batch.shape[dim] == cp.seq_len]
    return cp.shard(batch, dim=dims[0]) if dims else batch


def _positions(model: nn.Module, given: Mapping[str, object], cp: ContextParallel) -> dict[str, Tensor]:
    taken = inspect.signature(model.forward).parameters
    for name in ("position_ids", "positions"):
        if name in taken and name not in given:
            positions = cp.positions
            return {name: positions.unsqueeze(0) if name == "position_ids" and positions.dim() == 1 else positions}
    return {}


def _logits(out: object) -> Tensor:
    found = _named(out, "logits")
    if found is None:
        found = out[0] if isinstance(out, list | tuple) else out
    if not isinstance(found, Tensor):
        raise AttentionError(f"forward must return tensors, got {type(out).__name__}")
    return found


def _named(out: object, name: str) -> Any:
    """What a model returned by a name, as an attribute or in a dict."""
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def _loss_and_logits(out: object, cp: ContextParallel) -> tuple[Tensor, Tensor | None]:
    """What a forward returned; without a loss, the mean log-sum-exp is one: it has a gradient after a norm, too."""
    loss, logits = _named(out, "loss"), _named(out, "logits")
    if loss is None and isinstance(out, list | tuple) and isinstance(out[0], Tensor) and out[0].dim() == 0:
        loss, logits = out[0], out[1] if len(out) > 1 else None
    elif loss is None and isinstance(out, Tensor) and out.dim() == 0:
        loss = out
    if loss is None:
        logits = _logits(out)
        loss = cp.mean_loss(logits.to(lse_dtype(logits.dtype)).logsumexp(-1))
    return loss, logits


def _hints(
    errors: Mapping[str, float], first: Difference | None, calls: int, tolerance: float, alike: bool
) -> tuple[str, ...]:
    hints = []
    wrong = not all(error <= tolerance for error in errors.values())
    if calls == 0 and (wrong or first is not None):
        hints.append("no attention ran through the session: use cp.sdpa(), cp.attach(model) or cp.attention(...)")
    if first is not None and "given" in first.what:
        hints.append("what a model is given must be sharded by the session, positions too: cp.shard, cp.positions")
    if first is None and not errors["loss"] <= tolerance:
        hints.append("every module agrees: the difference is in the labels (cp.shift) or in the mean (cp.mean_loss)")
    if first is None and errors["loss"] <= tolerance and wrong:
        hints.append("the loss agrees and gradients do not: it must come from cp.mean_loss, and be averaged over ranks")
    if not wrong and not alike:
        hints.append("every rank has its own loss: their mean is right only while ranks hold equally many valid tokens")
    return tuple(hints)


def _tolerance(model: nn.Module, given: float | None) -> float:
    if given is not None:
        return given
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max((TOLERANCES.get(dtype, 5e-2) for dtype in dtypes), default=TOLERANCES[torch.float32])


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _length(batch: object) -> int:
    """The length of the sequence: dim 1 of the batch's first tensor."""
    for leaf in tree_leaves(_opened(batch)):
        if isinstance(leaf, Tensor) and leaf.dim() > 1:
            return leaf.shape[1]
    raise AttentionError("seq_len must be given: the batch has no tensor (batch, tokens, ...)")
