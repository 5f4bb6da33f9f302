"""Trainer and accelerate with an enabled model: which batches ranks get, and what is gathered from them.

Both give every process a batch of its own. The ranks of a session hold parts of one batch, so they must get the same:
``with dealing(accelerator, handle)`` around `accelerator.prepare(loader)` deals by data-parallel rank, and
`SpanTrainer` does that for its loaders::

    handle = enable(model, mesh["cp"])
    SpanTrainer(model=model, args=args, train_dataset=dataset).train()

Nothing else is needed: DDP and FSDP2 average gradients over all ranks, which the loss accounts for, with Trainer's
count of items and without (losses.py). In evaluation `compute_metrics` gets all tokens, each sample once.

[Note: a count of Trainer] Trainer counts the tokens of all micro-batches, and multiplies a loss by the number of
processes, since DDP will average and each has a batch of its own. The ranks of a session have one; so the count that
the model gets is larger by their number. Where tokens are not counted over processes (`average_tokens_across_devices`),
Trainer divides the count by the ranks of a batch all the same, and rounds down: that is refused. Before 5.22 it did not
divide by them, and losses came out too small by that factor: `TRAINER_DIVIDES_TOKENS` tells.

[Note: neighbours] Both take consecutive ranks for the ranks of one batch: on a mesh of (dp, cp), cp is the last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer

from attnspan.assumptions import Assumption
from attnspan.errors import ModelError
from attnspan.integrations.huggingface.batches import Entries
from attnspan.integrations.huggingface.enabling import Enabled, Output
from attnspan.integrations.huggingface.layer_binding import BINDING
from attnspan.integrations.huggingface.losses import Count
from attnspan.transports.distributed import Distributed
from attnspan.transports.group import transport_of

if TYPE_CHECKING:
    from accelerate import Accelerator

    _Trainer = Trainer
else:
    _Trainer = object  # a mixin, for Trainers of any kind


def enabled_of(model: nn.Module) -> Enabled:
    """What a model was enabled by, wrapped or not."""
    found: set[Enabled] = {
        binding.enabled for module in model.modules() if (binding := getattr(module, BINDING, None)) is not None
    }
    if len(found) != 1:
        raise ModelError(
            f"model must be enabled, or hold one model that is, got {len(found)}; call enable(model, cp) first"
        )
    return found.pop()


@contextmanager
def dealing(accelerator: Accelerator, handle: Enabled) -> Iterator[None]:
    """A block in which `accelerator.prepare(loader)` deals the ranks of the handle's session the same batches."""
    check_neighbours(handle, accelerator.num_processes)
    state, before = accelerator.state, accelerator.state.device_mesh
    if before is not None:
        raise ModelError(
            f"accelerate has a mesh of its own, {before}; leave cp_size and tp_size at 1: the ranks of a sequence are "
            "those of enable"
        )
    state.device_mesh = Dealt(accelerator.num_processes, handle.ranks)
    try:
        yield
    finally:
        state.device_mesh = before


@dataclass(frozen=True)
class Dealt:
    """What accelerate asks a mesh for when it prepares a loader: how many ranks get the same batch.

    >>> Dealt(processes=4, same=2)["dp_replicate"].size()
    2
    """

    processes: int
    same: int
    mesh_dim_names = ("dp_replicate", "cp")

    def __getitem__(self, name: str) -> SimpleNamespace:
        ranks = self.same if name == "cp" else self.processes // self.same
        return SimpleNamespace(size=lambda: ranks)


def check_neighbours(handle: Enabled, processes: int) -> None:
    """See [Note: neighbours]."""
    transport = handle.transport
    if transport.ranks == processes == 1:
        return  # this process alone, with a process group or without
    if not isinstance(transport, Distributed):
        whose = "ranks are virtual" if transport.ranks > 1 else f"session is of one of {processes} processes alone"
        raise ModelError(f"Trainer and accelerate need a process group, or a mesh of one; the handle's {whose}")
    ranks = dist.get_process_group_ranks(transport.group)
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))) or ranks[0] % len(ranks) or processes % len(ranks):
        raise ModelError(
            f"the ranks of a session must be neighbours, as along the last axis of a mesh of (dp, cp), got {ranks} of "
            f"{processes}"
        )


def _divides() -> bool:
    """Whether a count of 6 tokens, for a Trainer whose batches are those of 3 ranks each, is 2."""
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(average_tokens_across_devices=True, world_size=1, n_gpu=1),
        accelerator=SimpleNamespace(parallelism_config=None),
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
        _loss_shifts_labels=False,
        get_tp_size=lambda: 1,
        get_cp_size=lambda: 3,
        get_sp_size=lambda: 1,
    )
    batches = [{"labels": torch.ones(1, 6, dtype=torch.int64, device="cpu")}]
    count = Trainer._get_num_items_in_batch(trainer, batches, torch.device("cpu"))
    return bool(count == 2)


TRAINER_DIVIDES_TOKENS = Assumption(
    "Trainer divides its count of tokens by the ranks of a batch",
    "integrations/huggingface/training.py",
    "`Trainer._get_num_items_in_batch` and `get_cp_size`",
    _divides,
    library="transformers",
)


class SpanTrainerMixin(_Trainer):
    """For any Trainer whose model is enabled: ``class Mine(SpanTrainerMixin, Seq2SeqTrainer)``."""

    @property
    def span(self) -> Enabled:
        """What the model was enabled by."""
        assert self.model is not None, "a Trainer has a model"
        return enabled_of(self.model)

    def get_cp_size(self) -> int:
        """How many ranks are dealt the same batch."""
        return self.span.ranks

    def get_train_dataloader(self) -> DataLoader[object]:
        """The loader of training, dealt by data-parallel rank."""
        with self._dealing():
            return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: str | Dataset[object] | None = None) -> DataLoader[object]:
        """The loader of evaluation, dealt by data-parallel rank."""
        with self._dealing():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Dataset[object]) -> DataLoader[object]:
        """The loader of prediction, dealt by data-parallel rank."""
        with self._dealing():
            return super().get_test_dataloader(test_dataset)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Entries,
        return_outputs: bool = False,
        num_items_in_batch: Count = None,
        **more: Any,
    ) -> Tensor | tuple[Tensor, Output]:
        """The loss of the model; others would be computed from one rank's logits. See [Note: a count of Trainer]."""
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ModelError(
                "label_smoothing_factor and compute_loss_func: they would see one rank's logits, and are not served"
            )
        if model.training and self.args.neftune_noise_alpha is not None:
            raise ModelError("neftune_noise_alpha: noise would be drawn for each rank's tokens, and is not served")
        if num_items_in_batch is None:
            return super().compute_loss(model, inputs, return_outputs, **more)
        TRAINER_DIVIDES_TOKENS.verify()
        if self.span.ranks > 1 and not self.args.average_tokens_across_devices:
            raise ModelError("average_tokens_across_devices must be True: Trainer's count of tokens would be rounded")
        over = self.span.transport if self.span.over is None else transport_of(self.span.over)
        count = num_items_in_batch * over.ranks
        return super().compute_loss(model, inputs, return_outputs, count, **more)

    def _dealing(self) -> AbstractContextManager[None]:
        return dealing(self.accelerator, self.span)

    def _track_num_input_tokens(self, inputs: Entries) -> None:
        """Trainer adds up what processes have; the ranks of a session have the same."""
        state = self.state
        before = state.num_input_tokens_seen
        track: Callable[[Entries], None] = super()._track_num_input_tokens
        track(inputs)
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // self.span.ranks

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Entries,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **more: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A step of evaluation, whose logits are those of all tokens."""
        before, self.span.outputs = self.span.outputs, "shards" if prediction_loss_only else "whole"
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **more)
        finally:
            self.span.outputs = before

    @property
    def gather_function(self) -> Callable[[object], object]:
        """What gathers the results of evaluation: each sample once, whichever ranks it was on."""
        return self._gathered_once

    @gather_function.setter
    def gather_function(self, theirs: Callable[[object], object]) -> None:
        """Trainer sets accelerate's, which would give every sample as often as there are ranks in a session."""

    def _gathered_once(self, tensors: object) -> object:
        accelerator = self.accelerator
        processes, same, state = accelerator.num_processes, self.span.ranks, accelerator.gradient_state
        last = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def once(gathered: Tensor) -> Tensor:
            by_process: Tensor = gathered.unflatten(0, (processes, -1))
            return by_process[::same].flatten(0, 1)[:last]

        return tree_map_only(Tensor, once, accelerator.gather(tensors))


class SpanTrainer(SpanTrainerMixin, Trainer):
    """Trainer for an enabled model."""
