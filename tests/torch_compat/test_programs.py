"""Programs written for torch, with one import changed, train as one device does: on 2 and 4 ranks, gloo or NCCL."""

import torch

from tests.devices import mesh_of
from tests.processes import on_backends, spawn
from tests.torch_compat import programs

EVEN, ODD, SHORT = 32, 29, 3  # a multiple of 2 x ranks, as torch wants; a length that is not; fewer tokens than 4 ranks

PROGRAMS = {
    "titan's context, causal": (programs.titan_context, {"length": EVEN}),
    "titan's context, full": (programs.titan_context, {"length": EVEN, "causal": False}),
    "titan's context, rotating keys": (programs.titan_context, {"length": EVEN, "rotate_method": "alltoall"}),
    "titan's context, any length": (programs.titan_context, {"length": ODD}),
    "titan's context, a rank without tokens": (programs.titan_context, {"length": SHORT}),
    "titan's style, causal": (programs.titan_style, {"length": EVEN}),
    "titan's style, full": (programs.titan_style, {"length": EVEN, "causal": False}),
    "titan's style, no balance": (programs.titan_style, {"length": EVEN, "balance": False}),
    "titan's style, any length": (programs.titan_style, {"length": ODD}),
    "accelerate, causal": (programs.accelerate, {"length": EVEN}),
}


def live(world):
    """One process: the largest difference to one device, of every program."""
    line, grid = mesh_of(world.ranks), mesh_of(world.ranks // 2, 2, names=("dp", "cp"))
    found = {}
    for name, (program, options) in PROGRAMS.items():
        on_grid = program is programs.accelerate
        loss, grads, logits = program(grid if on_grid else line, **options)
        seed = grid["dp"].get_local_rank() if on_grid else 0
        alone = programs.alone(options["length"], options.get("causal", True), seed)
        pairs = [(loss, alone[0]), *((grads[each], alone[1][each]) for each in grads)]
        pairs += [(logits, alone[2])] if logits is not None else []
        found[name] = max(float((a - b).abs().max()) for a, b in pairs)
    out, expected = programs.dtensors(line, EVEN)
    found["titan's style, DTensors"] = float((out - expected).abs().max())
    return found


@on_backends(2, 4)
def test_a_program_written_for_torch_trains_as_on_one_device(ranks, backend):
    told = spawn(
        ranks, live, backend=backend, timeout=240, group_timeout=120
    )  # seconds alone; more where others work too
    assert [set(each) for each in told] == [{*PROGRAMS, "titan's style, DTensors"}] * ranks
    # float32, two layers; logits and gradients are of order 1 and differ in the order of sums: a few ulp.
    assert {name: error for each in told for name, error in each.items() if not error < 5e-6} == {}


def test_twin_attention_on_a_rank_alone_is_noticed():
    """The second half of the tokens with SDPA left as it is: how far off a missed call would be."""
    model, (inputs, _), half = programs.Model(), programs.batch(EVEN), EVEN // 2
    with torch.no_grad():
        missed = model(inputs[:, half:], torch.arange(half, EVEN).expand(2, -1))
    assert float((missed - programs.alone(EVEN)[2][:, half:]).abs().max()) > 1e-2
