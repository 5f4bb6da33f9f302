"""Which families of transformers are served: the table that docs/families.md publishes, and its totals.

The checks are those of `attnspan models` (integrations/huggingface/census.py). A reason is that of a family's default
config; names of layers and classes are left out of it, so that families with the same reason share a number.

Run: python -m benchmarks.models        writes docs/families.md (about a minute)
"""

from __future__ import annotations

import datetime
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import transformers

from attnspan.integrations.huggingface.census import FamilyReport, families, family, kinds
from benchmarks.report import folded, progress

RECENT = 2026
FILES = ("modeling", "modular", "configuration")
HEAD = 3000
"""Characters of a file in which its copyright line is."""

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"

FLAGSHIPS = {
    "gpt-oss": "gpt_oss",
    "Gemma 4": "gemma4",
    "Mistral 4": "mistral4",
    "MiniMax-M2": "minimax_m2",
    "OLMo 3": "olmo3",
    "HY-V3": "hy_v3",
    "MiMo-V2": "mimo_v2_flash",
    "Cohere2-MoE": "cohere2_moe",
    "EXAONE-MoE": "exaone_moe",
    "Seed-OSS": "seed_oss",
    "Solar": "solar_open",
    "DeepSeek V3.2": "deepseek_v32",
    "DeepSeek V4": "deepseek_v4",
    "Qwen3.5": "qwen3_5_text",
    "Qwen4-Exp": "qwen4_exp_text",
    "Kimi K2.5": "kimi_k25",
    "Kimi Linear": "kimi_linear",
    "GLM-5": "glm_moe_dsa",
    "GLM-5-Next": "glm5_next",
    "MiniMax-M3": "minimax_m3_vl_text",
    "Mistral Large 4": "mistral_large4",
    "HY-V4": "hy_v4",
    "Nemotron-H": "nemotron_h",
    "Granite 4 hybrid": "granitemoehybrid",
    "Llama 4": "llama4_text",
    "Muse": "muse_spark",
    "Step3.7": "step3p7",
    "OLMo-Hybrid": "olmo_hybrid",
    "Inkling2": "inkling_text",
    "LFM3": "lfm3",
    "Ling hybrid": "bailing_hybrid",
}
"""Models that many people run in 2026, and their families."""


def page(found: Sequence[FamilyReport]) -> str:
    """The page of these families."""
    numbers = _numbers(found)
    lines = [
        "# Families of transformers",
        "",
        "Written by `python -m benchmarks.models`; do not edit. `attnspan models` prints the same for the installed "
        "versions.",
        "",
        f"{datetime.date.today()}; transformers {transformers.__version__}, torch {torch.__version__}.",
        "",
        "Each family is built from its default config, without weights, and checked as `enable` (training over ranks, "
        "[huggingface.md](huggingface.md)) and `Engine` (generation, [engine.md](engine.md)) check a model. `no [1]` "
        "is refused with reason 1 at the end of the page. A served family is exact; a refused one raises before "
        "anything is computed. Some default configs lack a number that their models need, such as that of experts; it "
        "is completed in `LACKING` of integrations/huggingface/census.py.",
        "",
        *_totals(found),
        *(line for kind in kinds() for line in _table(kind, [each for each in found if each.kind == kind], numbers)),
        "## Reasons",
        "",
        *(f"{number}. {reason}" for reason, number in numbers.items()),
        "",
    ]
    return folded("\n".join(lines))


def _totals(found: Sequence[FamilyReport]) -> Iterator[str]:
    yield from ("| | families | training | generation |", "|---|---|---|---|")
    for kind in kinds():
        yield _total(kind, [each for each in found if each.kind == kind])
    by_name = {each.name: each for each in found if each.kind == "image-text"}
    by_name |= {each.name: each for each in found if each.kind == "causal"}
    flagships = [by_name[family] for family in FLAGSHIPS.values() if family in by_name]
    recent = [each for each in found if each.kind == "image-text" and year(each.name) == RECENT]
    yield _total(f"image-text, of {RECENT}", recent)
    yield _total("flagships", flagships)
    yield ""
    yield (
        f"A family is of {RECENT} if that is the newest year in the copyright lines at the head of its modeling, "
        "modular and configuration files; the package has no dates of release. A model that came out early in the year "
        "may have the year before (Qwen3.5 has 2025), and one that is older has the year in which transformers got it "
        f"(PP-FormulaNet). They are: {', '.join(each.name for each in recent)}."
    )
    yield ""
    without = [name for name, family in FLAGSHIPS.items() if family not in by_name]
    yield (
        f"Flagships are {', '.join(FLAGSHIPS)}; transformers {transformers.__version__} has no {', '.join(without)}. "
        "Where a flagship has a family of its text alone, that family counts."
        if without
        else f"Flagships are {', '.join(FLAGSHIPS)}."
    )
    yield ""


def year(family: str) -> int | None:
    """The newest year in the copyright lines of a family's files."""
    home = Path(inspect.getfile(transformers.CONFIG_MAPPING[family])).parent
    heads = [path.read_text()[:HEAD] for start in FILES for path in sorted(home.glob(f"{start}_*.py"))]
    years = [int(found) for head in heads for found in re.findall(r"Copyright.*?(20\d\d)", head)]
    return max(years, default=None)


def _total(what: str, found: Sequence[FamilyReport]) -> str:
    served = [sum(reason is None for reason in column) for column in zip(*map(_reasons, found), strict=True)]
    parts = [f"{count} ({count / len(found):.0%})" for count in served]
    return f"| {what} | {len(found)} | {' | '.join(parts)} |"


def _table(kind: str, found: Iterable[FamilyReport], numbers: dict[str, int]) -> Iterator[str]:
    yield from (f"## {kind.capitalize()}", "", "| family | class | training | generation |", "|---|---|---|---|")
    for each in found:
        marks = ["yes" if reason is None else f"no [{numbers[general(reason)]}]" for reason in _reasons(each)]
        yield f"| {each.name} | {each.model} | {' | '.join(marks)} |"
    yield ""


def _reasons(each: FamilyReport) -> tuple[str | None, str | None]:
    return each.training, each.generation


def _numbers(found: Iterable[FamilyReport]) -> dict[str, int]:
    """Reasons, the most frequent first."""
    counts = Counter(general(reason) for each in found for reason in _reasons(each) if reason is not None)
    return {reason: number for number, (reason, _) in enumerate(counts.most_common(), 1)}


def general(reason: str) -> str:
    """A reason without the names and numbers of one model.

    >>> general("h.0.attn (BloomAttention) has a way of its own, which is not served")
    'a way of its own, which is not served'
    >>> general("Llama4ForCausalLM: layer 3 of text_config is of the type 'chunked', which is not served")
    "layers are of the type 'chunked', which is not served"
    """
    for pattern, general in ONE_MODEL:
        reason = re.sub(pattern, general, reason)
    return reason


ONE_MODEL = [
    (r"^(\S+|the model) \(\w+\) (has )?|^\w+: (?=layer |its head)", ""),
    (r"^layer \d+( of \w+)? is of", "layers are of"),
    (r"^layers must be numbered .*", "layers that share their places in a cache"),
    (r"^(\w+\.)+\w+ (?=has |attends )", ""),
    (r"^attends \d+ times", "attends several times"),
    (r"^\w+ (?=has |takes |gives )", "the model "),
    (r"; those that are: .*|, got \[.*| \(model\.\w+\)| You can install .*", ""),
]
"""What a reason says of one model, and what stands for it."""


def main() -> None:
    transformers.logging.set_verbosity_error()
    wanted = [(kind, name) for kind in kinds() for name in families(kind)]
    PAGE.write_text(page([family(*each) for each in progress(wanted, "families")]))


if __name__ == "__main__":
    main()
