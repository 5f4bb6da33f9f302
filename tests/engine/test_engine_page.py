"""docs/engine.md tells the truth: its blocks are run as they stand, in order."""

import re
from pathlib import Path

import torch

from tests.engine.models import greedy

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_the_code_of_the_page_runs_and_its_tokens_are_those_of_model_generate():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) == 16
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    model, engine = names["model"], names["engine"]
    for prompt, answer in zip(names["prompts"], names["answers"], strict=True):
        assert answer.token_ids == greedy(model, prompt, 20)
    assert names["request"].finish_reason == "length"
    assert names["other"].finish_reason == "cancelled"
    assert names["answer"].token_ids == greedy(names["hybrid"], names["answer"].prompt, 4)
    assert names["streamed"] == names["whole"] == greedy(model, [5, 6, 7], 8)
    engine.check()
    seen = names["sees"].model.generate(**names["inputs"], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert names["about_image"].token_ids == seen[0, -5:].tolist()
    plain = model.generate(names["tokens"], max_new_tokens=10, num_beams=4, pad_token_id=0)
    assert plain.equal(names["beams"])
    for translation in names["translations"]:
        said = names["translator"].generate(torch.tensor([translation.prompt]), max_new_tokens=10, pad_token_id=0)
        assert translation.token_ids == said[0, 1:].tolist()
