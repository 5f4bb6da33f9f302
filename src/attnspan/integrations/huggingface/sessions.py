"""The sessions of a model's batches: a mask for every `LayerMask` of its layers, combined with documents and padding.

A `SessionFactory` is made once, from a group or a given session. It makes a session for each batch
(`ContextParallel.with_mask`), with one layout for all its masks, balanced by the number of layers that have each.
Without attention layers the layout is contiguous, and the mask only carries the documents.

[Note: the mask of a session] A given session has its own mask. Its `Documents` and `KeyPadding` become part of every
layer's mask. The rest must not hide keys that a layer sees: `Causal()` is fine for causal layers, also with a window;
for an encoder it is a mistake, and refused.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.batches import SequenceInputs
from attnspan.integrations.huggingface.forward_pass import LayerKind, LayerRole
from attnspan.integrations.huggingface.masking import LayerMask
from attnspan.integrations.huggingface.mixers import RecurrentMixer
from attnspan.layouts import Contiguous
from attnspan.masks import Causal, Documents, Full, KeyPadding, Mask
from attnspan.masks.combined import And, Not
from attnspan.parallel import ContextParallel
from attnspan.parallel.session_spec import SessionOptions
from attnspan.plan.choose import KeepKeys
from attnspan.transports.group import Group, transport_of


class SessionFactory:
    """Sessions for sequences of one kind: those of a model, or of its encoder or decoder."""

    def __init__(self, cp: ContextParallel | Group, layer_masks: Counter[LayerMask], keep_keys: KeepKeys | None = None):
        self.attends = bool(layer_masks)
        self.layer_masks, self.keep_keys = layer_masks or Counter({LayerMask(True, None): 0}), keep_keys
        self.given = cp if isinstance(cp, ContextParallel) else None
        if self.given is not None and len(self.given.masks) > 1:
            raise ModelError("cp must have one mask, which is for all layers; windows of layers are the model's own")
        self.group = cp.mesh if isinstance(cp, ContextParallel) else cp
        self.transport = cp.transport if isinstance(cp, ContextParallel) else transport_of(cp)
        self._first: ContextParallel | None = None

    def session(self, sequence: SequenceInputs, given: Mapping[LayerMask, LayerMask]) -> ContextParallel:
        """The session of a sequence; `given` are the masks of its batch where they are more than the layers'."""
        masks = {str(each): self._mask(given.get(each, each), sequence) for each in self.layer_masks}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        if self._first is None:
            self._first = self._made(sequence.seq_len, mask)
        session = self._first.with_mask(mask, seq_len=sequence.seq_len)
        session.layers = self.counts if len(masks) > 1 else self.layer_masks.total()
        return session

    @property
    def documents(self) -> list[Mask]:
        """The documents of the session that was given."""
        parts = [] if self.given is None else _parts(self.given.mask)
        return [part for part in parts if isinstance(part, Documents)]

    @property
    def counts(self) -> dict[str, int]:
        """How many layers have each mask, by its name."""
        return {str(layer_mask): count for layer_mask, count in self.layer_masks.items()}

    def name(self, layer_mask: LayerMask) -> str:
        """What a mask is called in a session."""
        return str(layer_mask) if len(self.layer_masks) > 1 else ""

    def _made(self, seq_len: int, mask: Mask | Mapping[str, Mask]) -> ContextParallel:
        weights = {name: float(count) for name, count in self.counts.items()} if len(self.layer_masks) > 1 else None
        options = SessionOptions() if self.given is None else self.given.options
        keep_keys = options.keep_keys if self.keep_keys is None else self.keep_keys
        if self.given is not None and weights is None and keep_keys == options.keep_keys:
            return self.given.with_mask(mask, seq_len=seq_len)
        layout = options.layout if self.attends or self.given is not None else Contiguous(self.transport.ranks)
        return ContextParallel(
            self.group, seq_len=seq_len, mask=mask, weights=weights, keep_keys=keep_keys,
            layout=layout, strategy=options.strategy, kernel=options.kernel,
        )  # fmt: skip

    def _mask(self, layer_mask: LayerMask, sequence: SequenceInputs) -> Mask:
        """What layers with a mask see of a sequence. See [Note: the mask of a session]."""
        length = sequence.seq_len
        data = [] if self.given is None else list(_data(self.given.mask, layer_mask, length))
        return functools.reduce(
            functools.partial(_both, length), [_own(layer_mask, sequence), *data, *sequence.batch_masks]
        )


def session_factories(
    cp: ContextParallel | Group,
    kinds: Sequence[LayerKind],
    mixers: Sequence[RecurrentMixer],
    keep_keys: KeepKeys | None,
) -> dict[LayerRole, SessionFactory]:
    """A factory for every sequence of a model with such layers and recurrent mixers."""
    roles: list[LayerRole] = list(dict.fromkeys(kind.role for kind in kinds if kind.role != "cross")) or ["only"]
    if len(roles) > 1 and isinstance(cp, ContextParallel) and cp.masks != {"": Full()}:
        raise ModelError("cp must be a mesh or a group for an encoder-decoder, whose sequences have masks of their own")
    data = _parts(cp.mask) if mixers and isinstance(cp, ContextParallel) else ()
    unseen = next((part for part in data if isinstance(part, KeyPadding | Not)), None)  # of data, they know documents
    if unseen is not None:
        raise ModelError(
            f"cp's mask has {unseen!r} in it, which recurrent mixers ({mixers[0].name}) do not see; give "
            "attention_mask with every batch"
        )
    if keep_keys not in (None, True, False, "auto"):
        raise ModelError(f"keep_keys must be True, False or 'auto', got {keep_keys!r}")
    return {
        role: SessionFactory(cp, Counter(kind.layer_mask for kind in kinds if kind.role == role), keep_keys)
        for role in roles
    }


def _own(layer_mask: LayerMask, sequence: SequenceInputs) -> Mask:
    """The mask of a layer; chunks are counted from where the tokens of a row begin, as in transformers."""
    if layer_mask.chunk is None or sequence.starts is None:
        return layer_mask.mask
    edges = [[*range(start % layer_mask.chunk, sequence.seq_len, layer_mask.chunk)] for start in sequence.starts]
    lengths = [[b - a for a, b in pairwise(sorted({0, *row, sequence.seq_len}))] for row in edges]
    return Causal() & Documents(lengths)


def _data(mask: Mask, layer_mask: LayerMask, seq_len: int) -> Iterator[Mask]:
    """The parts of a mask that are data; refuses others that hide what a layer sees."""
    for part in _parts(mask):
        if isinstance(part.inner if isinstance(part, Not) else part, Documents | KeyPadding):
            yield part
        elif _work(part & layer_mask.mask, seq_len) != _work(layer_mask.mask, seq_len, part.rows):
            raise ModelError(
                f"cp's mask has {part!r} in it, which hides keys that layers of the model see ({layer_mask}); give "
                "Documents or KeyPadding, or a mesh instead of a session"
            )


def _parts(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _parts(mask.left)
        yield from _parts(mask.right)
    else:
        yield mask


def _both(seq_len: int, one: Mask, other: Mask) -> Mask:
    """What both allow; one of them where the other adds nothing, so that the same sequence has the same mask."""
    both = one & other
    work = _work(both, seq_len)
    return next((each for each in (one, other) if _work(each, seq_len, both.rows) == work), both)


def _work(mask: Mask, seq_len: int, rows: int = 1) -> list[int]:
    """How much each batch row sees, for so many rows or as many as the mask has."""
    rows = max(rows, mask.rows)
    return [mask.work(seq_len, row=row if mask.rows > 1 else 0) for row in range(rows)]
