"""Start an example: under torchrun join its group, else start processes here. On CUDA devices over NCCL, else gloo.

python examples/02_packed_documents.py                         # two processes on this machine
torchrun --nproc-per-node=4 examples/02_packed_documents.py    # four
"""

import os
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Main = Callable[[], None]


def launch(main: Main, ranks: int = 2) -> None:
    """Run ``main`` on every rank of a process group."""
    if "RANK" in os.environ:
        dist.init_process_group(backend())
        _run(main)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_join, (main, ranks, f"file://{folder}/store"), nprocs=ranks)


def mesh_of(*shape: int, names: tuple[str, ...] = ("cp",)) -> DeviceMesh:
    """A mesh of all ranks; -1 is what is left of them."""
    known = -torch.tensor(shape).prod().item()
    sizes = [dist.get_world_size() // known if size == -1 else size for size in shape] if -1 in shape else shape
    return init_device_mesh(device().type, tuple(sizes), mesh_dim_names=names)


def device() -> torch.device:
    """Where this rank computes."""
    if backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def backend() -> str:
    """NCCL if every rank can have a GPU of its own."""
    return "nccl" if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 2)) else "gloo"


def say(*text: object) -> None:
    """Print once, not once per rank."""
    if dist.get_rank() == 0:
        print(*text, flush=True)


def _join(rank: int, main: Main, ranks: int, store: str) -> None:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group(backend(), init_method=store, rank=rank, world_size=ranks)
    _run(main)


def _run(main: Main) -> None:
    torch.set_num_threads(1)
    if backend() == "nccl":
        torch.cuda.set_device(device())
    main()
    dist.barrier()
    dist.destroy_process_group()
    # Threads of gloo may still run while Python takes itself down, which now and then aborts it: leave at once.
    sys.stdout.flush()
    os._exit(0)
