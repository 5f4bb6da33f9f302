"""What prompt-lookup speculation gains, by how much of an answer is in its prompt.

Run: python benchmarks/prompt_lookup.py            one CPU thread
     python benchmarks/prompt_lookup.py --cuda     a CUDA device, bfloat16

The model is random, and its layers are scaled down so far that the next token follows from the last one: a text that it
would write can be put into a prompt. Answers copy that text, until a token of it that was exchanged for another; then
they go on elsewhere in it. So the share of exchanged tokens stands for edits, and a prompt of random tokens for a text
that does not repeat. What a step costs is that of any model of its size.

Every answer is held to that without drafts. Engines run in turns; the fastest of each counts.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from attnspan import Engine, SamplingParams
from benchmarks.bench_engine import BILLION, MID
from benchmarks.report import command, folded, header

RESULTS = Path(__file__).parent / "results"
LENGTH, NEW, TURNS = 192, 96, 3
DRAFTS = (0, 4, 8)
EXCHANGED = {"none": 0.0, "5 %": 0.05, "20 %": 0.2, "all": 1.0}


def follower(case, device):
    """A model whose next token follows from the last, and a table of it."""
    model = case.model(device)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-4)
            layer.mlp.down_proj.weight.mul_(1e-4)
        model.model.embed_tokens.weight.normal_(0.0, 1.0, generator=torch.Generator(device).manual_seed(1))
        tokens = torch.arange(case.vocabulary, device=device).unsqueeze(1)
        after = torch.cat([model(part).logits[:, -1].argmax(-1) for part in tokens.split(500)])
    return model, after.tolist()


def asked(case, after, rows, share):
    """Prompts that end where the answer begins to copy them."""
    draw, found = random.Random(0), []
    for _ in range(rows):
        text = [draw.randrange(case.vocabulary)]
        while len(text) < LENGTH:
            text.append(after[text[-1]])
        changed = [draw.randrange(case.vocabulary) if draw.random() < share else token for token in text]
        found.append([*changed, text[0]])
    return found


class Turns:
    """An engine's answers to some prompts, the seconds of its fastest turn, and the steps and drafts of the last."""

    def __init__(self, engine, device):
        self.engine, self.seconds = engine, float("inf")
        self.clock = time.process_time if device == "cpu" else time.perf_counter

    def turn(self, prompts):
        before, began = self.engine.stats(), self.clock()
        answers = self.engine.generate(prompts, SamplingParams(max_new_tokens=NEW))
        self.seconds, after = min(self.seconds, self.clock() - began), self.engine.stats()
        self.said = [answer.token_ids for answer in answers]
        self.steps = after.steps - before.steps
        self.drafted = after.drafted_tokens - before.drafted_tokens
        self.accepted = after.accepted_tokens - before.accepted_tokens


def serving(model, rows, drafts):
    sizes = {"pages": rows * 20, "max_sequences": rows, "max_tokens": 512, "prefix_cache": False}
    return Engine(model, **sizes, prompt_lookup_num_tokens=drafts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda", action="store_true")
    device = "cuda" if parser.parse_args().cuda else "cpu"
    torch.set_num_threads(1)
    case = BILLION if device == "cuda" else MID
    model, after = follower(case, device)
    parameters = sum(each.numel() for each in model.parameters()) / 1e6
    lines = [
        f"{case.name}, {parameters:.1f}M parameters, {next(model.parameters()).dtype}. Prompts of {LENGTH + 1} tokens, "
        f"answers of {NEW}; the fastest of {TURNS} turns, prompts included. No prefix cache."
    ]
    lines += ["", "| rows | exchanged | drafts | steps | drafted | right | tokens / s | times as fast |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for rows in (1, 4, 16):
        for name, share in EXCHANGED.items():
            prompts = asked(case, after, rows, share)
            rivals = {drafts: Turns(serving(model, rows, drafts), device) for drafts in DRAFTS}
            for _ in range(TURNS):
                for rival in rivals.values():
                    rival.turn(prompts)
            for drafts, rival in rivals.items():
                assert device != "cpu" or rival.said == rivals[0].said, "drafts change no answer"
                right = f"{rival.accepted / rival.drafted:.0%}" if rival.drafted else "-"
                lines.append(
                    f"| {rows} | {name} | {drafts or 'off'} | {rival.steps} | {rival.drafted} | {right} | "
                    f"{rows * NEW / rival.seconds:.0f} | {rivals[0].seconds / rival.seconds:.2f} |"
                )
                print(lines[-1], flush=True)
    top = header("Prompt-lookup speculation", command("python benchmarks/prompt_lookup.py"))
    (RESULTS / f"prompt_lookup_{device}.md").write_text(folded("\n".join([*top, *lines, ""])))


if __name__ == "__main__":
    main()
