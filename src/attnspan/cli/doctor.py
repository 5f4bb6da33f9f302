"""`attnspan doctor`: versions, devices, which kernels run here and why others do not, and a self-test of a second.

The self-test is the real thing on virtual ranks: every strategy, forward and backward, against dense attention in
float64. It ends with exit code 1 if anything differs.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from attnspan._version import __version__
from attnspan.attention import attention
from attnspan.dtypes import dtype_name
from attnspan.kernels import KERNELS, Spec, refusals
from attnspan.layouts import Balanced
from attnspan.masks import Causal, Documents
from attnspan.masks.tile import Tile
from attnspan.testing import World, loopback

PACKAGES = ["triton", "numpy", "rich", "typer", "matplotlib", "transformers"]
STRATEGIES = ["ring", "gather", "needed(2)", "ulysses", "ulysses(2) x ring"]
RANKS, LENGTHS = 4, [37, 70, 21]
DTYPES = (torch.float32, torch.bfloat16)
TILES = {
    "full": Tile(range(64), range(64), -63, 63),
    "causal": Tile(range(64), range(64), -63, 0),
    "any band": Tile(range(64), range(64), -9, 5),
}
BOUND = 2e-5
"""An error that a correct run in float32 stays far below, and a wrong one far above: the numbers are about 1."""


def doctor() -> None:
    """Report what runs on this machine, and test it.

    Prints versions, devices, and for every kernel whether it runs here and why not; then tests attention on virtual
    ranks, against dense attention in float64.
    """
    for line in (*versions(), "", *devices(), ""):
        typer.echo(line)
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in here:
        for dtype in DTYPES:
            typer.echo(f"kernels on {device}, {dtype_name(dtype)}, head dim 64")
            for line in kernels(device, dtype):
                typer.echo(f"  {line}")
    typer.echo()
    ok = True
    for device in here:
        start = time.perf_counter()
        errors = {strategy: self_test(strategy, device) for strategy in STRATEGIES}
        worst = max(errors, key=lambda strategy: errors[strategy])
        ok &= errors[worst] <= BOUND
        took = time.perf_counter() - start
        typer.echo(
            f"self-test on {device}: {len(STRATEGIES)} strategies, {RANKS} virtual ranks, forward and backward: "
            f"largest error {errors[worst]:.1e} ({worst}), {took:.1f} s"
        )
    typer.echo("all well" if ok else f"wrong: an error above {BOUND:.0e}")
    if not ok:
        raise typer.Exit(1)


def versions() -> Iterator[str]:
    """One line for each thing that matters."""
    yield f"attnspan {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}, cuDNN {_cudnn()}"
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()} if dist.is_available() else {}
    yield "torch.distributed: " + (", ".join(name for name, there in backends.items() if there) or "not available")
    yield "optional: " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES)


def devices() -> Iterator[str]:
    """The devices, one per line."""
    yield f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}: {device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"


def kernels(device: str, dtype: torch.dtype) -> Iterator[str]:
    """For every kernel the kinds of tile that it computes, or why it does not."""
    x = torch.empty(1, 2, 64, 64, dtype=dtype, device=device)
    reasons = {kind: refusals(Spec(scale=0.125), x, x, x, (tile,)) for kind, tile in TILES.items()}
    for name in KERNELS:
        able = [kind for kind in TILES if name not in reasons[kind]]
        why = next((reasons[kind][name] for kind in TILES if name in reasons[kind]), "")
        yield f"{name:12}" + (", ".join(able) or "no") + (f" ({why})" if why else "")


def self_test(strategy: str, device: str) -> float:
    """The largest error of out and gradients over all ranks."""
    mask, seq_len = Causal() & Documents(LENGTHS), sum(LENGTHS)
    layout = Balanced(mask, ranks=RANKS, chunk=4)
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, seq_len, 32, generator=draw).to(device) for heads in (4, 2, 2)]
    true = _differentiated([x.double() for x in whole], lambda q, k, v: _dense(q, k, v, mask.dense(seq_len).to(device)))

    def rank(world: World) -> list[Tensor]:
        own = torch.tensor(layout.positions(seq_len)[world.rank], device=device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attention(q, k, v, mask=mask, layout=layout, seq_len=seq_len, group=world, strategy=strategy)
            assert isinstance(out, Tensor), "no lse was asked for"
            return out

        found = _differentiated([x[:, :, own] for x in whole], attend)
        return [(a - b[:, :, own]).abs().max() for a, b in zip(found, true, strict=True)]

    return max(float(error) for errors in loopback(RANKS, device).run(rank) for error in errors)


def _dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores: Tensor = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ v


def _differentiated(tensors: list[Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Out and the gradients of a loss that looks at all of it."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cudnn() -> str:
    cudnn = torch.backends.cudnn
    return str(cudnn.version()) if cudnn.is_available() else "absent"
