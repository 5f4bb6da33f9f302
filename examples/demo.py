"""Train a small transformer on packed documents over four ranks, beside the same training on one device; then let a
model of transformers answer over pages that are spread over four ranks.

The text is this repository's own. Every batch packs other documents; each rank holds a quarter of every sequence. What
to look at: the losses agree to the printed digits, the ranks have equal work, few keys travel, and a prompt that no
rank's pages could hold is continued with the tokens of one device.

Run: make demo    (about two minutes on a laptop without a GPU)
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launch
from model import Model
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.text import Text
from tiny_text import trained as reading
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import attnspan as span
from attnspan import Engine, SamplingParams
from attnspan.inspector.picture import picture
from attnspan.plan.drawing import table

RANKS, SEQ_LEN, STEPS = 4, 1024, 40
ROOT = Path(__file__).parents[1]


# ---- data: documents cut from the repository's own text, packed ------------------------------------------------------


Pack = tuple[torch.Tensor, list[int]]  # tokens, document lengths


def packs() -> list[Pack]:
    """One for every step."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("src/**/*.py")])
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(0)
    return [_pack(text, random) for _ in range(STEPS)]


def _pack(text: torch.Tensor, random: torch.Generator) -> Pack:
    """A few long documents and many short ones, as training packs are."""
    lengths: list[int] = []
    while (left := SEQ_LEN - sum(lengths)) > 0:
        drawn = int(torch.randn((), generator=random).mul(1.2).add(4.4).exp())
        lengths.append(min(left, max(4, drawn)))
    starts = torch.randint(len(text) - SEQ_LEN, (len(lengths),), generator=random).tolist()
    return torch.cat([text[start : start + n] for start, n in zip(starts, lengths, strict=True)])[None], lengths


# ---- training, once on ranks and once alone --------------------------------------------------------------------------


def over_ranks(batches: list[Pack], results: str) -> None:
    """What every rank runs."""
    family = span.ContextParallel(seq_len=SEQ_LEN, mask=span.Causal())

    def loss_of(model: Model, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        cp = family.with_mask(span.Causal() & span.Documents(lengths))
        own = cp.shard(tokens, dim=1)
        labels = cp.shift(own, by=-1, fill=-100, documents=True)
        return cp.mean_loss(per_token(model(own, cp.positions, cp.attention), labels), labels != -100)

    def finish(model: Model) -> None:
        family.average_gradients(model)

    losses = trained(batches, loss_of, finish, f"{RANKS} ranks   ", shown=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(losses))


def alone(batches: list[Pack]) -> list[float]:
    """The same on one device."""
    torch.set_num_threads(1)

    def loss_of(model: Model, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        mask = (span.Causal() & span.Documents(lengths)).dense(SEQ_LEN)
        attend = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        labels[:, torch.tensor(lengths).cumsum(0) - 1] = -100
        losses = per_token(model(tokens, torch.arange(SEQ_LEN), attend), labels)
        return losses[labels != -100].mean()

    return trained(batches, loss_of, lambda model: None, "one device", shown=True)


def per_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)


def trained(batches: list[Pack], loss_of, finish, name: str, *, shown: bool) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    said = TextColumn("{task.description}"), TextColumn("loss {task.fields[loss]:.4f}")
    with Progress(said[0], BarColumn(), said[1], TimeElapsedColumn(), disable=not shown) as progress:
        bar = progress.add_task(name, total=STEPS, loss=float("nan"))
        for tokens, lengths in batches:
            loss = loss_of(model, tokens, lengths)
            loss.backward()
            finish(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(bar, advance=1, loss=losses[-1])
    return losses


# ---- what came of it -------------------------------------------------------------------------------------------------


def main() -> None:
    if "RANK" in os.environ:
        raise SystemExit(f"the demo starts its own {RANKS} ranks: run it without torchrun, as `make demo`")
    console = Console()
    print(
        f"Training on {STEPS} packs of {SEQ_LEN} tokens, {RANKS} ranks on the CPU (gloo), and the same on one device\n"
    )
    batches = packs()
    with tempfile.NamedTemporaryFile() as results:
        launch(partial(over_ranks, batches, results.name), RANKS)
        found = json.load(results)
    expected = alone(batches)

    print("\n1. The loss\n")
    steps = [*range(0, STEPS, 8), STEPS - 1]
    print(
        table(["step", f"{RANKS} ranks", "one device"], [[i, f"{found[i]:.4f}", f"{expected[i]:.4f}"] for i in steps])
    )
    console.print(f"\n{curve(found)}", highlight=False)
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    print(f"largest difference over all {STEPS} steps: {worst:.1e}")
    assert worst < 5e-5, "the losses differ"

    _, lengths = batches[0]
    mask = span.Causal() & span.Documents(lengths)
    print(f"\n2. The first pack, {len(lengths)} documents, on {RANKS} ranks: who works, what travels\n")
    head = ["layout, strategy", "work of the ranks", "largest / mean", "KB received"]
    print(table(head, list(costs(mask, lengths))))

    where = picture(mask, span.Balanced(mask, ranks=RANKS, chunk=8), SEQ_LEN, ROOT / "demo.png")
    print(f"\n3. A picture of the mask, coloured by rank: {where.name}")

    print(f"\n4. A model of transformers reads this repository, and answers over pages of {RANKS} ranks\n")
    with tempfile.TemporaryDirectory() as folder:
        read(folder)
        expected = answer(folder, pages=256)
        print(f"a prompt of {len(expected.prompt)} tokens; a rank's pages hold {PAGES * 16}. On {RANKS} ranks:\n")
        launch(partial(answer_over_ranks, folder, expected.token_ids), RANKS)


# ---- a model that answers --------------------------------------------------------------------------------------------

PAGES = 6  # of each rank
PROMPT = "Attention over ranks is exact or refused: a plan says what travels, and what every rank computes. " * 4


def read(folder: str) -> None:
    """A tiny Llama, trained on the repository's text, saved as transformers does."""
    model, tokenizer, first, last = reading(500, track=partial(track, description="reading   "))
    disable_progress_bar()
    print(f"{model.num_parameters():,} parameters, loss {first:.2f} to {last:.2f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answer(folder: str, **where):
    """A continuation of the prompt."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = Engine(model, tokenizer=AutoTokenizer.from_pretrained(folder), **where)
    return engine.generate([PROMPT], SamplingParams(max_new_tokens=60, temperature=0.6, seed=1))[0]


def answer_over_ranks(folder: str, expected: list[int]) -> None:
    """What every rank runs: the prompt computed under context parallelism, its keys in the pages of all."""
    found = answer(folder, pages=PAGES, mesh=dist.group.WORLD, context_parallel_from=64)
    assert found.token_ids == expected, "the tokens differ from those of one device"
    if dist.get_rank() == 0:
        show(PROMPT[-98:], found.text)


def show(prompt: str, answer: str) -> None:
    """The end of the prompt, and what came of it in bold where that can be shown."""
    told = Text(prompt) + Text(answer, style="bold")
    Console().print(told, "\nThe same tokens as on one device.", sep="\n", soft_wrap=True, highlight=False)


def costs(mask: span.Mask, lengths: list[int]):
    """Ours, and what torch's context parallelism would do with the same pack."""
    rivals = [
        ("attnspan: Balanced, only needed keys", span.Balanced(mask, ranks=RANKS, chunk=8), "needed"),
        ("torch's default: head-tail, all keys", span.HeadTail(RANKS), "gather"),
        ("torch's by work (PTRR), all keys", span.RoundRobinByWork(mask, ranks=RANKS), "gather"),
        ("each document head-tail, all keys", span.PerDocument(lengths, ranks=RANKS), "gather"),
    ]
    shape = span.Shape(heads=4, kv_heads=2, head_dim=16, dtype="float32")
    for name, layout, strategy in rivals:
        plan = span.Plan(mask, layout, SEQ_LEN, strategy)
        received = [sum(plan.bytes_received(rank, shape).values()) / 1e3 for rank in range(RANKS)]
        work = layout.work_per_rank(mask, SEQ_LEN)
        sizes = " ".join(f"{size:.0f}" for size in received)
        yield [name, " ".join(map(str, work)), f"{layout.imbalance(mask, SEQ_LEN):.3f}", sizes]


def curve(losses: list[float], height: int = 8) -> str:
    """The losses as a drawing."""
    low, high = min(losses), max(losses)
    rows = [round((high - loss) / (high - low or 1) * (height - 1)) for loss in losses]
    lines = ["".join("●" if row == line else " " for row in rows) for line in range(height)]
    return "\n".join(f"{high - (high - low) * i / (height - 1):5.2f} ┤{line}" for i, line in enumerate(lines))


if __name__ == "__main__":
    main()
