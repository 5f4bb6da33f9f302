"""A model of Hugging Face trained on packed documents over ranks, beside the same model on one device.

Run: python examples/14_huggingface.py    or    torchrun --nproc-per-node=4 examples/14_huggingface.py
"""

import copy

import torch
from launch import device, launch, mesh_of, say
from torch.distributed.fsdp import fully_shard
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import attnspan as span

VOCAB, LENGTHS, STEPS = 256, [90, 7, 130, 29], 4  # 256 tokens in four documents
CONFIG = Gemma3TextConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=32,
    layer_types=["sliding_attention", "full_attention"],
    pad_token_id=None,
)


def packed(step):
    """Documents one after another, as DataCollatorWithFlattening gives them: positions begin anew with each."""
    tokens = torch.randint(VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(step)).to(device())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device())
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}


def main():
    torch.manual_seed(0)
    alone = Gemma3ForCausalLM(CONFIG).to(device())
    model = copy.deepcopy(alone)

    mesh = mesh_of(-1)
    handle = span.enable(
        model, mesh
    )  # from here on: whole batches in, this rank's tokens computed, the loss of all out
    for layer in handle.layers:
        say(layer)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})

    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, alone))
    for step in range(STEPS):
        loss = model(**packed(step)).loss
        loss.backward()
        ours.step(), ours.zero_grad()

        expected = alone(**packed(step), use_cache=False).loss
        expected.backward()
        theirs.step(), theirs.zero_grad()
        say(f"step {step}: loss {loss.item():.6f} on {mesh.size()} ranks, {expected.item():.6f} alone")
        assert abs(loss.item() - expected.item()) < 1e-3

    handle.assert_used(passes=STEPS)
    say(handle.session.report())


if __name__ == "__main__":
    launch(main)
