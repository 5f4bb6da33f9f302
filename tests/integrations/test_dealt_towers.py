"""Towers whose images are dealt over ranks: loss, logits and all gradients are one device's; the rest is refused."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from attnspan.errors import ModelError
from attnspan.integrations.huggingface import enable
from attnspan.testing import loopback
from tests.integrations.families import BOUND, answers, enabled_answers, off
from tests.integrations.families import family as text_family
from tests.integrations.images import SPECS, batch, family
from tests.integrations.more_images import SELDOM
from tests.processes import spawn
from tests.turns import in_turn

pytestmark = pytest.mark.usefixtures("quietly")

REFUSED = {
    "mistral3": r"what model.vision_tower \(PixtralVisionModel\) computes of an image is not rows of its own, or",
    "hunyuan-vl": r"what model.vision_tower .* computes of an image is not rows of its own, or depends on the other",
    "molmo2": r"model.multi_modal_projector is called with argument 1 of shape \(12, 2\), which is not a row for each",
    "gemma4-unified": "Gemma4UnifiedForConditionalGeneration has none that could be dealt",
    "fuyu": "FuyuForCausalLM has none that could be dealt",
}
DEALT = [name for name in SPECS if name not in REFUSED]
CASES = [(2, "several"), (4, "several"), (2, "one"), (2, "text")]
IMAGES = {"several": ((2, 11), (6,)), "one": ((), (8,)), "text": ((), ())}


def on_ranks(ranks, name, given):
    return loopback(ranks).run(lambda world: enabled_answers(world, family(name), given, towers="dealt"))


@pytest.mark.parametrize(("name", "case"), in_turn(DEALT, CASES, SELDOM))
def test_a_family_answers_as_on_one_device(name, case):
    ranks, images = case
    given = batch(name, images=IMAGES[images])
    true = answers(family(name), given, use_cache=False)
    for found in on_ranks(ranks, name, given):
        assert off(found, true)[0] < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DEALT)
def test_a_family_answers_as_on_one_device_in_every_case(name, ranks, images):
    given = batch(name, images=IMAGES[images], length=26, seed=ranks)
    true = answers(family(name), given, use_cache=False)
    for found in on_ranks(ranks, name, given):
        assert off(found, true)[0] < BOUND


def of_sizes():
    """Qwen's images of 4, 2 and 8 tokens."""
    given, sides = batch("qwen3-vl", images=((2,), (3, 10)), length=25), [(4, 4), (2, 4), (4, 8)]
    rows, image, end = given["input_ids"], 60, 62
    rows[1, 3:8] = torch.tensor([image, image, end, 5, 6])
    rows[1, 10:19] = torch.tensor([image] * 8 + [end])
    given["mm_token_type_ids"] = (rows == image).long()
    given["labels"] = rows.masked_fill(rows >= 50, -100)
    noise = torch.randn(sum(a * b for a, b in sides), 96, generator=torch.Generator().manual_seed(4))
    return given | {"pixel_values": noise, "image_grid_thw": torch.tensor([(1, *side) for side in sides])}


@pytest.mark.parametrize("ranks", [2, 3])
def test_images_of_several_sizes(ranks):
    given = of_sizes()
    true = answers(family("qwen3-vl"), given, use_cache=False)
    for found in on_ranks(ranks, "qwen3-vl", given):
        assert off(found, true)[0] < BOUND


@pytest.mark.parametrize(("towers", "rows"), [("dealt", [1, 2]), ("whole", [3, 3])])
def test_each_rank_computes_its_images(towers, rows):
    given = batch("llava")

    def rank(world):
        model, seen = family("llava"), []
        layer = model.model.vision_tower.encoder.layers[0]
        layer.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        with enable(model, world, towers=towers):
            for _ in range(2):
                model(**given)
        assert "forward" not in vars(model.model.vision_tower)
        return seen[-1]

    assert loopback(2).run(rank) == rows


def trained(world, given):
    """What DDP and FSDP2 answer."""
    found = []
    for wrap in (DistributedDataParallel, sharded):
        model = family("gemma3")
        handle = enable(model, world, towers="dealt")
        run = wrap(model)  # which averages gradients for as long as it is there
        out = run(**given)
        out.loss.backward()
        grads = {key: getattr(each.grad, "full_tensor", each.grad.clone)() for key, each in model.named_parameters()}
        found.append((out.loss.detach(), handle.unshard(out.logits.detach()), grads))
    return found


def sharded(model):
    for layer in [*model.model.language_model.layers, *model.model.vision_tower.encoder.layers]:
        fully_shard(layer)
    fully_shard(model.model.vision_tower)
    return fully_shard(model)


def test_ddp_and_fsdp2_average_the_gradients_of_towers():
    given = batch("gemma3")
    true = answers(family("gemma3"), given, use_cache=False)
    for found in spawn(2, trained, given):
        for each in found:
            assert off(each, true)[0] < BOUND


def test_gradient_checkpointing_of_towers_and_decoder():
    given = batch("qwen3-vl")
    true = answers(family("qwen3-vl"), given, use_cache=False)

    def rank(world):
        model = family("qwen3-vl")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return enabled_answers(world, model, given, towers="dealt")

    for found in loopback(2).run(rank):
        assert off(found, true)[0] < BOUND


def test_gradients_that_are_not_added_up_would_be_noticed(monkeypatch):
    given = batch("llava")
    true = answers(family("llava"), given, use_cache=False)
    moves = "attnspan.integrations.huggingface.dealt_towers.GatheredTokens.backward"
    own = staticmethod(lambda ctx, grad: (grad.split(ctx.sizes)[ctx.transport.rank], None, None, None))
    monkeypatch.setattr(moves, own)
    assert max(off(found, true)[0] for found in on_ranks(2, "llava", given)) > 100 * BOUND


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_towers_that_are_not_dealt(name):
    with pytest.raises(ModelError, match=f"towers must be 'whole': {REFUSED[name]}"):
        on_ranks(2, name, batch(name))


def test_images_that_depend_on_each_other(monkeypatch):
    given = batch("llava")

    def rank(world):
        model = family("llava")
        layer = model.model.vision_tower.encoder.layers[0]
        layer.register_forward_hook(lambda _, args, out: out + out.mean(0, keepdim=True))
        with enable(model, world, towers="dealt"), pytest.raises(ModelError, match="depends on the other images"):
            model(**given)

    loopback(2).run(rank)


def test_a_model_without_towers_and_a_word_that_means_nothing():
    def rank(world):
        with pytest.raises(ModelError, match="towers must be 'whole': LlamaForCausalLM has none that could be dealt"):
            enable(text_family("llama"), world, towers="dealt")
        with pytest.raises(ModelError, match="towers must be one of whole, dealt, got 'split'"):
            enable(family("llava"), world, towers="split")

    loopback(1).run(rank)
