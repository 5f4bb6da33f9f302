"""`attnspan generate`: continue a text with a transformers model, and print it as it comes.

::

    $ attnspan generate --model ./my-model --prompt "Attention is" --max-new-tokens 40
    $ attnspan generate --model ./my-model --prompt @book.txt --ranks 2          # two processes on this machine
    $ torchrun --nproc-per-node=8 -m attnspan generate --model ./my-model --prompt @book.txt

Under torchrun it joins the group; otherwise it starts `--ranks` processes. Keys are spread over all ranks, and all
ranks together compute long prompts. The text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from attnspan import Engine, SamplingParams
from attnspan.errors import EngineError, integer
from attnspan.measure import Ranks
from attnspan.transports import Transport


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """What is to be done, as it travels to the processes that do it."""

    model: str
    prompt: str
    params: SamplingParams
    pages: int | None
    page_size: int


def generate(
    model: Annotated[str, typer.Option(metavar="PATH_OR_NAME", help="A folder, or a model name for transformers.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue; @FILE reads it from a file.")],
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to generate at most.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="Sampling temperature; 0 is greedy. Default: the model's own, or 0."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Sample from the K likeliest tokens; 0: all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Sample from the likeliest tokens of total probability P.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(metavar="P", help="Leave out tokens less than P times as likely as the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="R", help="Above 1: tokens that occurred become less likely.")
    ] = None,
    min_new_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens to generate at least.")] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text not to generate. Repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed: the same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text. Repeatable.")] = None,
    ranks: Annotated[int, typer.Option(metavar="R", help="Processes to start; keys and prompt are spread.")] = 1,
    pages: Annotated[int | None, typer.Option(metavar="N", help="Pages per rank. Default: as many as needed.")] = None,
    page_size: Annotated[int, typer.Option(metavar="N", help="Tokens per page on each rank.")] = 16,
) -> None:
    """Continue a text with a transformers model.

    Runs on one rank, on local processes (--ranks), or under torchrun. Keys are spread over the ranks.
    """
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens,
        bad_words=bad_word or None,
        seed=seed,
        stop=stop or None,
    )
    ranks = integer("--ranks", ranks, at_least=1, error=EngineError)
    page_size = integer("--page-size", page_size, at_least=1, error=EngineError)
    job = GenerateJob(checked_model(model), _read(prompt), params, pages, page_size)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # processes on this machine: each has a GPU, or none has
    device = "cuda" if torch.cuda.device_count() >= here else "cpu"
    asked = Ranks(None if ranks == 1 else ranks, device)
    if asked.launched or asked.count > 1:
        asked.run(partial(on_rank, job))
    else:
        _generate(job, torch.device(device))


# ---- what is asked ---------------------------------------------------------------------------------------------------


def checked_model(model: str) -> str:
    """A model that may exist: what looks like a path must be a folder."""
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise EngineError(f"--model must be a folder of a model, or a name that transformers finds, got {model!r}")
    return model


def _read(prompt: str) -> str:
    if not prompt.startswith("@"):
        return prompt
    path = Path(prompt[1:]).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"--prompt {prompt}: the file cannot be read ({error})") from None


def load_model(name: str, device: torch.device, bar: bool, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The model and its tokenizer; with a bar while it loads, if one is wanted. Code that comes with a model is not run
    unless it is trusted."""
    try:
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers import logging as bars
    except ImportError:
        raise EngineError('transformers is not installed; run pip install "attnspan[hf]"') from None
    if not bar:
        bars.disable_progress_bar()
    part, own_code = "model", {"trust_remote_code": trust_remote_code}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **own_code)
        part = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(name, **own_code)
    except (OSError, ValueError, ImportError, SafetensorError) as error:  # of files, and of what reads them
        said = " ".join(str(error).split()) or repr(error)  # in one line
        raise EngineError(f"--model {name}: transformers cannot load its {part}: {said}") from None
    return model.to(device).eval(), tokenizer


# ---- doing it --------------------------------------------------------------------------------------------------------


def on_rank(job: GenerateJob, transport: Transport) -> None:
    """One rank's part."""
    _generate(job, transport.device, dist.group.WORLD)


def _generate(job: GenerateJob, device: torch.device, mesh: Any = None) -> None:
    """Generate, and print as it comes; on rank 0 alone."""
    model, tokenizer = load_model(
        job.model, device, bar=mesh is None
    )  # bars of several ranks would overwrite each other
    ranks, rank = (1, 0) if mesh is None else (dist.get_world_size(mesh), dist.get_rank(mesh))
    tokens = tokenizer.encode(job.prompt)
    needed = -(-(len(tokens) + (job.params.max_new_tokens or 0)) // (job.page_size * ranks)) + 1
    pages = needed if job.pages is None else job.pages
    engine = Engine(model, pages=pages, page_size=job.page_size, mesh=mesh, tokenizer=tokenizer)
    start, count = time.perf_counter(), 0
    for token in engine.stream(tokens, job.params):
        count += 1
        if rank == 0 and token.text:
            typer.echo(token.text, nl=False)
            sys.stdout.flush()
    if rank == 0:
        typer.echo()
        rate = count / (time.perf_counter() - start)
        where = "one rank" if ranks == 1 else f"{ranks} ranks"
        typer.echo(f"{len(tokens)} tokens of prompt, {count} more, {rate:.1f} per second on {where}", err=True)
