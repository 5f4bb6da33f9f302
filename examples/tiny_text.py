"""A tiny language model that has read this repository: a minute on a laptop, and it says something."""

from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
LENGTH, ROWS = 96, 8


def text():
    """What there is to read: the prose and the code of the package, the same on every machine."""
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(ROOT.glob("docs/*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages if page.exists())


def tokenizer_of(corpus, vocabulary=512):
    """Byte-level BPE: every text can be written."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    inner.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


def trained(steps=200, seed=0, track=iter):
    """(model, tokenizer, first loss, mean of the last ten) after so many steps; `track` may draw a bar of them.

    One batch of this size is off by a tenth, and another text draws other batches.
    """
    corpus = text()
    tokenizer = tokenizer_of(corpus)
    tokens = torch.tensor(tokenizer.encode(corpus))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    draw, losses = torch.Generator().manual_seed(seed), []
    for _ in track(range(steps)):
        starts = torch.randint(0, len(tokens) - LENGTH, (ROWS,), generator=draw)
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval().requires_grad_(False), tokenizer, losses[0], fmean(losses[-10:])
