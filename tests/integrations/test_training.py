"""Real processes: DDP, FSDP2, accelerate and Trainer train an enabled model as one device trains it.

A spawn of two processes runs many checks and returns numbers; slow ones have four, data parallel too. Batches are made
on the CPU, also where models are on CUDA: loaders shuffle and deal them there.
"""

import functools
import os
import tempfile
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from attnspan.errors import ModelError
from attnspan.integrations.huggingface import SpanTrainer, dealing, enable
from attnspan.integrations.huggingface.training import check_neighbours, enabled_of
from attnspan.testing import loopback
from tests.integrations.families import BOUND, VOCAB, answers, batch, family, off
from tests.processes import on_backends, spawn

STEPS_BOUND = 2e-4
"""Parameters after three steps of Adam, which divides by the root of tiny squares; gradients agree within BOUND."""


# ---- DDP and FSDP2 ---------------------------------------------------------------------------------------------------


def blocks(model):
    if not hasattr(model, "model"):
        return [*model.encoder.block, *model.decoder.block]
    return (
        model.model.layers
        if hasattr(model.model, "layers")
        else [*model.model.encoder.layers, *model.model.decoder.layers]
    )


def sharded(model, mesh):
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def distance(name, mesh, wrapped, *, before=False):
    """How far two steps of a model, wrapped after it was enabled or `before`, are from one device's."""
    givens = [there(batch(name, seed=seed, length=20 + seed), mesh) for seed in range(2)]
    model = family(name).to(mesh.device_type)
    run = wrapped(model) if before else None
    handle = enable(model, mesh)
    run = run or wrapped(model)
    worst = 0.0
    for given in givens:
        model.zero_grad()
        out = run(**given)
        out.loss.backward()
        found = out.loss.detach(), handle.unshard(out.logits.detach()), whole_gradients(model)
        worst = max(worst, off(found, alone_on(mesh, name, given))[0])
    return worst


def there(given, mesh):
    """A batch where the ranks of a mesh compute."""
    return {name: value.to(mesh.device_type) for name, value in given.items()}


def alone_on(mesh, name, given):
    """What a model answers by itself, on such a device."""
    return answers(family(name).to(mesh.device_type), there(given, mesh))


def whole_gradients(model):
    grads = {name: each.grad for name, each in model.named_parameters()}
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else None if grad is None else grad.clone()
        for name, grad in grads.items()
    }


def on_cpu(fn):
    """What is made without a device is made on the CPU, whatever the world's is."""

    @functools.wraps(fn)
    def called(*args):
        with torch.device("cpu"):
            return fn(*args)

    return called


@on_cpu
def two(world):
    tolerant()
    mesh = init_device_mesh(world.device.type, (2,), mesh_dim_names=("cp",))
    found = {f"{name} under DDP": distance(name, mesh, DistributedDataParallel) for name in ("llama", "gpt-oss")}
    for name, before in (("gemma2", True), ("bart", False), ("t5", True)):
        found[f"{name} under FSDP2"] = distance(name, mesh, lambda model: sharded(model, mesh), before=before)
    found["accelerate"] = accelerated(world, mesh)
    return found, on_process(world, 2, {})


def tolerant():
    # transformers and accelerate bring warnings of their own and of torch about; ours are errors elsewhere
    warnings.simplefilter("ignore")


@on_backends(2)
def test_two_processes_train_as_one_device(alone, ranks, backend):
    true = alone()
    for found, history in spawn(ranks, two, backend=backend, timeout=120):
        assert {name: off for name, off in found.items() if not off < BOUND} == {}
        compare(history, true)  # Trainer, under DDP


# ---- accelerate ------------------------------------------------------------------------------------------------------


class Texts(Dataset):
    """Random texts of one length, whose first tokens have no label."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, place):
        tokens = torch.randint(1, VOCAB, (15,), generator=torch.Generator().manual_seed(place))
        labels = tokens.clone()
        labels[: place % 5] = -100
        return {"input_ids": tokens, "labels": labels}


def joined(world):
    """What torchrun would have said. The local rank is the number of the device, which ranks may share."""
    from accelerate.state import AcceleratorState

    ranks, device = str(world.ranks), world.device
    local = world.rank if device.type == "cpu" else device.index
    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(local), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    if device.type == "cpu":
        os.environ.update(ACCELERATE_USE_CPU="true")
    AcceleratorState._reset_state(reset_partial_state=True)  # what an earlier function of this process has set


def accelerated(world, mesh):
    """How far a loop with accelerate is from one device's."""
    from accelerate import Accelerator

    joined(world)
    accelerator = Accelerator(cpu=world.device.type == "cpu")
    model = family("llama").to(world.device)
    handle = enable(model, mesh["cp"])
    run = accelerator.prepare(model)
    with dealing(accelerator, handle):
        loader = accelerator.prepare(DataLoader(Texts(6), batch_size=2))
    assert accelerator.state.device_mesh is None
    worst = 0.0
    for given, whole in zip(loader, DataLoader(Texts(6), batch_size=2), strict=True):
        model.zero_grad()
        out = run(**given)
        accelerator.backward(out.loss)
        found = out.loss.detach(), handle.unshard(out.logits.detach()), whole_gradients(model)
        worst = max(worst, off(found, alone_on(mesh, "llama", whole))[0])
    return worst


# ---- Trainer ---------------------------------------------------------------------------------------------------------


def trained(cls, model, *, rows=2, eval_rows=2, eval_texts=7, use_cpu=True, **more):
    """Losses, norms, evaluation and parameters of three steps, two micro-batches each."""
    from transformers import TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            per_device_eval_batch_size=eval_rows,
            gradient_accumulation_steps=2,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            use_cpu=use_cpu,
            disable_tqdm=True,
            log_level="error",
            include_num_input_tokens_seen="all",
            **more,
        )
        texts = {"train_dataset": Texts(24), "eval_dataset": Texts(eval_texts)}
        trainer = cls(model=model, args=args, compute_metrics=metrics, **texts)
        trainer.train()
        said = trainer.evaluate()
    logged = [each for each in trainer.state.log_history if "loss" in each]
    history = [(each["loss"], each["grad_norm"], each["num_input_tokens_seen"]) for each in logged]
    end = {name: each.detach() for name, each in trainer.model.named_parameters()}
    end = {name: (each.full_tensor() if hasattr(each, "full_tensor") else each).tolist() for name, each in end.items()}
    return history, {name: said[f"eval_{name}"] for name in ("loss", "texts", "right")}, end


def metrics(predicted):
    """Of how many texts there were logits and labels, and of how many tokens the likeliest was right."""
    logits, labels = predicted.predictions[:, :-1], predicted.label_ids[:, 1:]
    valid = labels != -100
    return {"texts": len(labels), "right": float((logits.argmax(-1) == labels)[valid].mean())}


@on_cpu
def on_process(world, cp, more, over_all=False):
    tolerant()
    joined(world)
    mesh = init_device_mesh(world.device.type, (world.ranks // cp, cp), mesh_dim_names=("dp", "cp"))
    model = family("llama").to(world.device)
    enable(model, mesh["cp"], over=mesh._flatten("all") if over_all else None)
    return trained(SpanTrainer, model, use_cpu=world.device.type == "cpu", **more)


def compare(found, true):
    (history, said, end), (true_history, true_said, true_end) = found, true
    torch.testing.assert_close(torch.tensor(history), torch.tensor(true_history), rtol=STEPS_BOUND, atol=0)
    assert said == pytest.approx(true_said, rel=STEPS_BOUND)
    for name, value in true_end.items():
        torch.testing.assert_close(torch.tensor(end[name]), torch.tensor(value), rtol=0, atol=STEPS_BOUND, msg=name)


@pytest.fixture
def alone():
    """transformers' own Trainer in this process."""
    from transformers import Trainer

    def train(**more):
        with warnings.catch_warnings():
            tolerant()
            return trained(Trainer, family("llama"), **more)

    return train


FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


@on_backends(slow=(2,))
def test_trainer_with_fsdp2_trains_as_on_one_device(alone, ranks, backend):
    true = alone()
    for found in spawn(ranks, on_process, 2, FSDP2, backend=backend, timeout=120):
        compare(found, true)


@on_backends(slow=(4,))
@pytest.mark.parametrize(
    ("more", "over_all"), [({}, False), (FSDP2, False), ({}, True)], ids=["DDP", "FSDP2", "DDP, over all"]
)
def test_trainer_with_data_parallel_ranks_trains_on_all_tokens(alone, more, over_all, ranks, backend):
    """Two pairs of ranks: a step has the rows of both, which one device takes at once; losses are means over tokens."""
    true = alone(rows=4, eval_rows=4, eval_texts=8)
    for found in spawn(ranks, on_process, 2, more | {"eval_texts": 8}, over_all, backend=backend, timeout=240):
        compare(found, true)


@on_cpu
def four(world):
    tolerant()
    mesh = init_device_mesh(world.device.type, (2, 2), mesh_dim_names=("dp", "cp"))
    given = there(batch(rows=4), mesh)
    own = {name: value.chunk(2)[mesh["dp"].get_local_rank()] for name, value in given.items()}
    model = family("llama").to(world.device)
    handle = enable(model, mesh["cp"], over=mesh._flatten("all"))
    run = DistributedDataParallel(model)  # it averages for as long as it lives
    out = run(**own)
    out.loss.backward()
    true = alone_on(mesh, "llama", given)
    logits = true[1].chunk(2)[mesh["dp"].get_local_rank()]
    found = out.loss.detach(), handle.unshard(out.logits.detach()), whole_gradients(model)
    return off(found, (true[0], logits, true[2]))[0], refusal_of_strangers(world)


def refusal_of_strangers(world):
    mesh = init_device_mesh(world.device.type, (2, 2), mesh_dim_names=("cp", "dp"))
    handle = enable(family("llama").to(world.device), mesh["cp"])
    try:
        check_neighbours(handle, 4)
    except ModelError as refusal:
        return str(refusal)


@on_backends(slow=(4,))
def test_four_processes_take_means_over_all_tokens_and_must_be_neighbours(ranks, backend):
    for far, refusal in spawn(ranks, four, backend=backend, timeout=120):
        assert far < BOUND
        assert refusal.startswith("the ranks of a session must be neighbours")


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_model_that_was_not_enabled_is_refused():
    with pytest.raises(ModelError, match=r"^model must be enabled, or hold one model that is, got 0"):
        enabled_of(nn.Sequential(family("llama")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, r"^label_smoothing_factor and compute_loss_func: they would see one rank's"),
        (
            {"neftune_noise_alpha": 5.0},
            r"^neftune_noise_alpha: noise would be drawn for each rank's tokens, and is not",
        ),
    ],
    ids=["smoothing", "noise"],
)
def test_what_would_see_one_ranks_tokens_alone_is_refused(tmp_path, options, message):
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], log_level="error", **options)
    model = family("llama")
    loopback(1).run(lambda world: enable(model, world))
    with pytest.raises(ModelError, match=message):
        SpanTrainer(model=model, args=args).compute_loss(model, batch())


def test_a_trainer_goes_by_what_its_model_is_enabled_by_now(tmp_path):
    from transformers import TrainingArguments

    def rank(world):
        model = family("llama")
        first = enable(model, world)
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], log_level="error")
        trainer = SpanTrainer(model=model, args=args)
        assert trainer.span is first
        first.disable()
        second = enable(model, world)
        assert trainer.span is second

    loopback(1).run(rank)


def test_a_count_that_trainer_rounds_is_refused(tmp_path):
    from transformers import TrainingArguments

    def rank(world):
        model = family("llama")
        enable(model, world)
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], log_level="error")
        trainer = SpanTrainer(model=model, args=args)
        args.average_tokens_across_devices = False
        with pytest.raises(ModelError, match=r"^average_tokens_across_devices must be True: Trainer's count of tokens"):
            trainer.compute_loss(model, batch(), num_items_in_batch=torch.tensor(37))

    loopback(2).run(rank)


def test_virtual_ranks_are_not_for_trainer():
    def rank(world):
        with pytest.raises(
            ModelError, match=r"need a process group, or a mesh of one; the handle's ranks are virtual$"
        ):
            check_neighbours(enable(family("llama"), world), 2)

    loopback(2).run(rank)
