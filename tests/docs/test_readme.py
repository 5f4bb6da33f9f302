"""README.md tells the truth: its code runs as it stands, its drawing is what the command prints, and it stays short."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import attnspan as span
from attnspan.cli.app import app
from tests.engine.models import VOCABULARY, greedy, tiny
from tests.parallel.model import SEQ_LEN, VOCAB, Llama

PAGE = Path(__file__).parents[2] / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")
TEN_LINES, SDPA, ENABLE, ENGINE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
MAX_WORDS = 1000


def run(block, **names):
    exec(compile(block, PAGE.name, "exec"), names)
    return names


class Plain(Llama):
    """A model that knows nothing of sessions: it calls F.scaled_dot_product_attention."""

    def forward(self, tokens, positions):
        return super().forward(tokens, positions, self)

    def attention(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_the_ten_lines_print_a_plan_of_four_ranks(capsys):
    run(TEN_LINES)
    printed = capsys.readouterr().out
    assert "ranks=4" in printed
    assert "imbalance 1.00" in printed


def test_sdpa_inside_a_block_gives_the_logits_of_one_device():
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % VOCAB
    model = Plain()

    def rank(world):
        cp = span.ContextParallel(world, seq_len=SEQ_LEN, mask=span.Causal())
        logits = run(SDPA, cp=cp, model=model, tokens=tokens)["logits"]
        return cp.unshard(logits.detach(), dim=1)

    expected = model(tokens, torch.arange(SEQ_LEN)).detach()
    for logits in span.testing.loopback(2).run(rank):
        torch.testing.assert_close(logits, expected)


def test_an_enabled_model_gives_the_loss_of_one_device():
    whole = tiny("Llama")
    tokens = torch.arange(64).view(2, 32) % VOCABULARY
    batch = {"input_ids": tokens, "labels": tokens}
    copies = [copy.deepcopy(whole) for _ in range(2)]

    def rank(world):
        names = run(ENABLE, span=span, model=copies[world.rank], mesh={"cp": world}, batch=batch)
        names["handle"].disable()
        return names["loss"].item()

    expected = whole(**batch).loss.item()
    assert span.testing.loopback(2).run(rank) == pytest.approx([expected] * 2, rel=1e-5)  # float32, a few hundred sums


def test_the_engine_gives_the_tokens_of_generate():
    model, prompts = tiny("Llama"), [[5, 6, 7], [8] * 20]
    answers = run(ENGINE, span=span, model=model, prompts=prompts, tokenizer=None)["answers"]
    assert [answer.token_ids for answer in answers] == [greedy(model, prompt, 100) for prompt in prompts]


def test_the_drawing_is_what_the_command_prints():
    [(arguments, drawing)] = re.findall(r"```\n\$ attnspan (.*?)\n(.*?)```", TEXT, re.DOTALL)
    words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', arguments)]
    printed = CliRunner().invoke(app, words).stdout
    assert "\n".join(line.rstrip() for line in printed.splitlines()) == drawing.rstrip()


def test_it_stays_short():
    assert len(TEXT.split()) <= MAX_WORDS
