"""`attnspan serve`: a transformers model behind OpenAI's API.

::

    $ attnspan serve --model ./my-model                                  # http://127.0.0.1:8000, a page at /
    $ attnspan serve --model ./my-model --adapter formal=./my-lora       # as models my-model and formal
    $ ATTNSPAN_API_KEY=secret attnspan serve --model ./my-model --host 0.0.0.0 --port 80
    $ torchrun --nproc-per-node=8 -m attnspan serve --model ./my-model   # rank 0 listens, the others follow

Under torchrun it joins the group; otherwise it starts `--ranks` processes. docs/serving.md describes the rest.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer

from attnspan import Engine
from attnspan.cli.generate import checked_model, load_model
from attnspan.engine import follow
from attnspan.errors import EngineError, RankError, integer
from attnspan.measure import Ranks
from attnspan.transports import Transport

if TYPE_CHECKING:
    from attnspan.server import ServerConfig


@dataclass(frozen=True, slots=True)
class ServeJob:
    """What is to be done, as it travels to the processes that do it."""

    model: str
    config: ServerConfig
    options: dict[str, Any]  # of the engine
    adapters: dict[str, str]  # their folders, by name
    max_waiting: int
    trust_remote_code: bool


def serve(
    model: Annotated[str, typer.Option(metavar="PATH_OR_NAME", help="A folder, or a model name for transformers.")],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0: any that is free.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call the model. Default: its folder's name.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter of peft, served as a model NAME. Repeatable."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="ATTNSPAN_API_KEY",
            show_envvar=True,
            help="A key that requests must bring. Repeatable; in the environment, keys are separated by spaces.",
        ),
    ] = None,
    shared_prefix_cache: Annotated[
        bool, typer.Option("--shared-prefix-cache", help="Keys share cached prefixes; times tell of others' prompts.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A host name to answer to. Repeatable.")
    ] = None,
    ranks: Annotated[int, typer.Option(metavar="R", help="Processes to start; keys are spread over them.")] = 1,
    pages: Annotated[int | None, typer.Option(metavar="N", help="Pages per rank. Default: by free memory.")] = None,
    page_size: Annotated[int, typer.Option(metavar="N", help="Tokens per page on each rank.")] = 16,
    max_sequences: Annotated[int, typer.Option(metavar="N", help="Samples that run at once.")] = 64,
    max_waiting: Annotated[int, typer.Option(metavar="N", help="Samples that may wait; more are refused.")] = 256,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens of an answer.")] = 4096,
    max_body: Annotated[int, typer.Option(metavar="BYTES", help="The longest body of a request.")] = 4 << 20,
    max_n: Annotated[int, typer.Option(metavar="N", help="The most samples of a prompt.")] = 16,
    drain: Annotated[float, typer.Option(metavar="SECONDS", help="How long a shutdown awaits open requests.")] = 30.0,
    prompt_lookup_num_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens to draft from what was said before; 0: none.")
    ] = 0,
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs", help="Decode with CUDA graphs; for one rank.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Serve a transformers model by OpenAI's API, with a page to try it at /.

    Runs on one rank, on local processes (--ranks), or under torchrun. Keys are spread over the ranks.
    """
    try:
        from attnspan.server import ServerConfig
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise EngineError(f'{missing.name} is not installed; run pip install "attnspan[serve]"') from None
    ranks = integer("--ranks", ranks, at_least=1, error=EngineError)
    name, adapters = checked_model(model), _folders(adapter or ())
    config = ServerConfig(
        served_model_name or Path(name).resolve().name if Path(name).is_dir() else served_model_name or name,
        host,
        port,
        adapters=tuple(adapters),
        api_keys=tuple(api_key or ()),
        shared_prefix_cache=shared_prefix_cache,
        allowed_hosts=tuple(allowed_host or ()),
        max_body=max_body,
        max_new_tokens=max_new_tokens,
        max_n=max_n,
        drain=drain,
    )
    options = {
        "pages": pages, "page_size": page_size, "max_sequences": max_sequences, "cuda_graphs": cuda_graphs,
        "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
    }  # fmt: skip
    job = ServeJob(name, config, options, adapters, max_waiting, trust_remote_code)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # processes on this machine: each has a GPU, or none has
    device = "cuda" if torch.cuda.device_count() >= here else "cpu"
    asked = Ranks(None if ranks == 1 else ranks, device)
    if asked.launched:
        asked.run(partial(on_rank, job))
    elif asked.count > 1:
        _on_started_ranks(job, asked)
    else:
        _serve(job, torch.device(device))


def _folders(adapters: Sequence[str]) -> dict[str, str]:
    """The folders of adapters by their names."""
    found: dict[str, str] = {}
    for each in adapters:
        name, _, folder = each.partition("=")
        path = Path(folder).expanduser()
        if not name or not folder or not (path / "adapter_config.json").is_file():
            raise EngineError(f"--adapter must be NAME=FOLDER, of an adapter that peft has saved, got {each!r}")
        if name in found:
            raise EngineError(f"--adapter {name} is given twice; adapters have names of their own")
        found[name] = str(path)
    return found


def _with_adapters(model: Any, adapters: Mapping[str, str]) -> Any:
    """The model with its adapters, each of which a request may name."""
    if not adapters:
        return model
    try:
        from peft import PeftModel
        from safetensors import SafetensorError
    except ImportError:
        raise EngineError("peft is not installed, and --adapter needs it; run pip install peft") from None
    if hasattr(model, "peft_config"):
        raise EngineError("--model has an adapter of its own; give its base model, and the adapter by --adapter")
    for name, folder in adapters.items():
        try:
            if isinstance(model, PeftModel):
                model.load_adapter(folder, adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, folder, adapter_name=name)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
            said = " ".join(str(error).split()) or repr(error)
            raise EngineError(f"--adapter {name}={folder}: peft cannot load it: {said}") from None
    return model.eval()


def _on_started_ranks(job: ServeJob, asked: Ranks) -> None:
    """Serve on processes of our own. SIGINT and SIGTERM are handed on to them: rank 0 then ends the others. While they
    still load, it ends them all."""
    came: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        ranks = multiprocessing.active_children()
        if len(ranks) < asked.count:  # they are not all there yet, or one is lost
            raise KeyboardInterrupt
        for rank in ranks:
            os.kill(rank.pid or 0, signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asked.run(partial(on_started_rank, job))
    except (RankError, KeyboardInterrupt) as error:
        ended = [str(outcome) for outcome in getattr(error, "outcomes", ())]
        if came and (not ended or "was ended by SIGTERM" in ended):
            raise typer.Exit(128 + came[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_started_rank(job: ServeJob, transport: Transport) -> None:
    """A rank's part that `_on_started_ranks` has started: interrupts of a terminal are left to that process."""
    os.setpgrp()
    on_rank(job, transport)


def on_rank(job: ServeJob, transport: Transport) -> None:
    """One rank's part."""
    _serve(job, transport.device, dist.group.WORLD)


def _serve(job: ServeJob, device: torch.device, mesh: Any = None) -> None:
    from attnspan.server import Server

    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    model, tokenizer = load_model(job.model, device, bar=mesh is None, trust_remote_code=job.trust_remote_code)
    follows = mesh is not None and dist.get_rank(mesh) > 0
    if follows:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # all ranks are told; rank 0 says when to end
    engine = Engine(_with_adapters(model, job.adapters), mesh=mesh, tokenizer=tokenizer, **job.options)
    if follows:
        follow(engine)
        return
    if device.type == "cuda" and mesh is None:
        engine.warm_up()

    server = Server(engine, tokenizer, job.config, max_waiting=job.max_waiting)
    typer.echo(f"{engine!r}\nlistening on {server.address}, as {', '.join(job.config.models)}", err=True)
    server.run()
