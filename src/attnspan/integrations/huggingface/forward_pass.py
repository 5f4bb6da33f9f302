"""The state of a forward pass of an enabled model, and how layers find it.

[Note: the pass of a region] Layers use the session of the current pass of their model. A checkpointed layer is
recomputed in backward, possibly after another pass; it uses the pass of its first run (checkpoint_regions.py). If the
model was disabled by then, it is enabled during the recomputation. If the whole call is checkpointed, its recomputation
has a pass of its own, which layers then use and which is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.batches import SequenceInputs
from attnspan.integrations.huggingface.biases import ScoreBias
from attnspan.integrations.huggingface.losses import Count
from attnspan.integrations.huggingface.masking import LayerMask
from attnspan.integrations.huggingface.mixer_functions import ShardedTokens
from attnspan.parallel import ContextParallel, checkpoint_regions
from attnspan.parallel.attentions import SessionAttention

LayerRole = Literal["only", "encoder", "decoder", "cross"]
"""Where a layer attends: in the only sequence, or one of two; "cross": queries of the decoder, keys of the encoder."""


class LayerKind(NamedTuple):
    """What layers that share a `SessionAttention` have in common."""

    role: LayerRole
    layer_mask: LayerMask
    scale: float
    softcap: float | None
    bias: ScoreBias | None


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass: the sessions of its batch, an attention for every kind of layer, and labels for the loss."""

    session: ContextParallel  # of what is returned: the only sequence, or the decoder's
    encoder: ContextParallel | None
    attentions: list[SessionAttention]  # by index in `Enabled.kinds`
    layer_masks: list[LayerMask]  # in this batch, by index in `Enabled.kinds`
    calls_before: Counter[int]  # `calls_so_far` when it began
    mixer_tokens: ShardedTokens
    labels: Tensor | None = None
    count: Count = None
    max_position: int | Tensor = 0
    document_positions: Tensor | None = None  # of the tokens of a whole row, if not 0, 1, 2, ...
    tables: dict[object, Tensor] = field(default_factory=dict)  # of biases, made when a layer first asks
    rerun_regions: WeakSet[object] = field(default_factory=WeakSet)  # checkpointed regions whose recomputation made it

    @property
    def query_positions(self) -> Tensor:
        """The global positions of the queries, (S,) or (B, S)."""
        assert self.encoder is None, "no encoder-decoder counts positions in its layers"
        return self.session.positions


@dataclass(frozen=True)
class WholeBatch:
    """A batch while a model with towers runs on all of it, until it calls its decoder."""

    sequence: SequenceInputs
    labels: Tensor | None
    count: Count


class ModelPasses:
    """The passes of a model: the running one, the latest, and those of checkpointed regions and outputs."""

    def __init__(self) -> None:
        self.running: ForwardPass | None = None
        self._latest: ForwardPass | None = None
        # The pass in which a region first ran.
        self._of_region: WeakKeyDictionary[object, ForwardPass] = WeakKeyDictionary()
        self._of_output: MutableMapping[Tensor, ForwardPass] = WeakTensorKeyDictionary()

    def begin(self, current: ForwardPass | None) -> None:
        """A pass begins; None if it begins only when the decoder is called."""
        self.running = current
        if current is not None and not current.rerun_regions:
            self._latest = current

    def end(self) -> ForwardPass | None:
        """The pass that ran; from now on layers can only run in backward."""
        current, self.running = self.running, None
        return current

    def returned(self, current: ForwardPass, outputs: Iterable[Tensor]) -> None:
        """Record the tensors that a pass returned."""
        for each in outputs:
            self._of_output[each] = current

    def of_output(self, outputs: Iterable[Tensor]) -> ForwardPass:
        """The pass that returned one of these tensors, or the latest."""
        known = self._of_output
        return next((known[each] for each in outputs if each in known), self.latest())

    def latest(self) -> ForwardPass:
        """The latest pass that was not a repetition."""
        if self._latest is None:
            raise ModelError("there is no batch: call the model first")
        return self._latest

    def disable(self, run_again: Callable[..., object]) -> None:
        """No more passes; regions of earlier ones are recomputed through `run_again`."""
        self._latest = None
        for region in list(self._of_region):
            checkpoint_regions.rerun_through(region, run_again)

    def current(self) -> ForwardPass:
        """The pass that a layer runs in. See [Note: the pass of a region]."""
        found = self.running
        if torch.compiler.is_compiling():
            return found  # type: ignore[return-value]
        for region in reversed(checkpoint_regions.regions()):
            if region.name is None:
                continue
            if found is not None and region.name in found.rerun_regions:
                continue
            if region.recomputing and region.name in self._of_region:
                found = self._of_region[region.name]
            elif found is not None and not region.recomputing:
                self._of_region[region.name] = found
        if found is None:
            raise ModelError("a layer of an enabled model runs by itself; call the model that was enabled, model(...)")
        return found


def calls_so_far(attentions: Iterable[SessionAttention]) -> Counter[int]:
    """How often attention has run, by the id of the `Uses` that counts it."""
    calls = [each.attend.bound.uses for each in attentions]
    return Counter({id(uses): uses.forward.total() for uses in calls})
