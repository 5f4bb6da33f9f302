"""The loss of ``model(labels=...)``: the mean over the tokens of all ranks, as one device would take it.

The model's own loss would be the mean over a rank's tokens, with labels shifted within the shard. So labels are not
passed to the model: they are shifted while they are whole (batches.py), and the loss is computed from the logits. This
equals the model's loss only if that is cross entropy per token; its kind is read from the model:

    next           causal models: a token's label is the next token
    next_unpadded  the same, without labels in padding, whatever they are (audio models)
    own            masked models, classes of tokens, encoder-decoders: a token's label is its own

Everything else (classes of whole texts, balancing of experts) is refused when labels are given.

[Note: a count] With `num_items_in_batch` the sum of a batch's losses is divided by that number instead of the batch's
own tokens: with gradient accumulation, all batches are parts of one mean, over ranks as on one device.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from attnspan.errors import ModelError
from attnspan.parallel.batch import IGNORED
from attnspan.parallel.loss import summed_over
from attnspan.transports.group import Group, transport_of

if TYPE_CHECKING:
    from attnspan.parallel import ContextParallel

LabelKind = Literal["next", "next_unpadded", "own"]
Count = int | Tensor | None
"""The items of a batch, as Trainer counts them."""

BY_FUNCTION: dict[object, LabelKind] = {ForCausalLMLoss: "next", ForMaskedLMLoss: "own", ForTokenClassification: "own"}


ADDED = re.compile(r"^\s+loss (?:\+=|= loss [-+*/])(?!.*\b(?:aux_loss|z_loss)\b)", re.MULTILINE)
"""A line that changes a loss by something that checking.py does not refuse."""


PLAIN = re.compile(r"CrossEntropyLoss\((ignore_index=-100)?\)")
"""Cross entropy, as models write it that have no function for it."""

UNSHIFTED = re.compile(r"loss_fct\((outputs\.)?logits\.view\(-1, self\.config\.vocab_size\), labels\.view\(-1\)\)")
"""The loss of decoders taken out of an encoder-decoder (BART), whose labels are shifted by whoever gives them."""


def label_kind(model: nn.Module) -> LabelKind | None:
    """The kind of a model's loss; None if it is not supported."""
    forward = inspect.unwrap(type(model).forward)
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return None
    if ADDED.search(source):
        return None
    if "self.loss_function(" in source:
        return BY_FUNCTION.get(model.loss_function)
    if "shift_attention_mask" in source:
        return "next_unpadded"
    heads = ("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")
    if PLAIN.search(source) and any(head in type(model).__name__ for head in heads):
        return "own"
    if "ForCausalLM" in type(model).__name__ and UNSHIFTED.search(source):
        return "own"
    return None


def align_labels(labels: Tensor, kind: LabelKind) -> Tensor:
    """Whole labels, (B, S), each at the token whose logits predict it.

    >>> align_labels(torch.tensor([[5, 6, 7]]), "next")
    tensor([[   6,    7, -100]])
    """
    return labels if kind == "own" else F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def loss_of(logits: Tensor, labels: Tensor, session: ContextParallel, count: Count, over: Group) -> Tensor:
    """The loss of this rank's logits and labels. See [Note: a count]."""
    if logits.shape[:-1] != labels.shape:
        raise ModelError(
            f"labels must be one for each token, {tuple(logits.shape[:-1])} on this rank, got {tuple(labels.shape)}"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits.device)
    each = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    valid = labels != IGNORED
    if count is not None and over is not None:  # counted over all ranks, by whoever calls the model
        count = summed_over(torch.as_tensor(count, device=logits.device).clone(), transport_of(over))
    return session.mean_loss(each.view_as(labels), valid, count=count, over=over)
