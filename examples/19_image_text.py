"""A tiny image-text model, trained over ranks to say which corner of an image is bright, then asked over pages.

Run: python examples/19_image_text.py    or    torchrun --nproc-per-node=2 examples/19_image_text.py
"""

import copy

import torch
from launch import device, launch, mesh_of, say
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import attnspan as span

IMAGE, VOCAB, STEPS, ROWS = 60, 64, 60, 16
QUESTION, ANSWERS = [7, 8, 9], torch.tensor([20, 21, 22, 23])  # which corner?  upper left, upper right, lower ...
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CONFIG = Gemma3Config(
    vision_config={"model_type": "siglip_vision_model", "hidden_size": 32, "image_size": 8, "patch_size": 4} | LAYERS,
    text_config={"vocab_size": VOCAB, "hidden_size": 32, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    | LAYERS,
    image_token_index=IMAGE,
    mm_tokens_per_image=4,
    eos_token_id=None,
)


def images(corners, seed):
    """Noise, with one corner of each image bright."""
    pixels = 0.3 * torch.randn(len(corners), 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    for image, corner in zip(pixels, corners.tolist(), strict=True):
        down, right = 4 * (corner // 2), 4 * (corner % 2)
        image[:, down : down + 4, right : right + 4] += 2
    return pixels


def asked(corners, seed):
    """What a processor returns: tokens with four places for each image, which of them are the image's, and pixels."""
    tokens = torch.tensor([1, *[IMAGE] * 4, *QUESTION]).expand(len(corners), -1)
    given = {"input_ids": tokens, "token_type_ids": (tokens == IMAGE).long(), "pixel_values": images(corners, seed)}
    return {name: value.to(device()) for name, value in given.items()}


def lesson(seed):
    """Questions with their answers, which alone have labels."""
    corners = torch.randint(4, (ROWS,), generator=torch.Generator().manual_seed(seed))
    given = asked(corners, seed)
    answer = ANSWERS[corners].to(device())[:, None]
    given["token_type_ids"] = torch.nn.functional.pad(given["token_type_ids"], (0, 1))
    labels = torch.cat([torch.full_like(given["input_ids"], -100), answer], dim=1)
    return given | {"input_ids": torch.cat([given["input_ids"], answer], dim=1), "labels": labels}


def main():
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(CONFIG).to(device())
    with torch.no_grad():  # what a tower that has seen nothing tells of a place is little, and of images nothing
        model.model.vision_tower.embeddings.position_embedding.weight.normal_(std=1.0)
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.5)
    alone = copy.deepcopy(model)

    handle = span.enable(model, mesh_of(-1))  # towers run whole on every rank, the decoder on this rank's tokens
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, alone))
    for step in range(STEPS):
        loss = model(**lesson(step)).loss
        loss.backward()
        handle.session.average_gradients(model)  # of the towers too
        ours.step(), ours.zero_grad()
        if step < 3:
            expected = alone(**lesson(step), use_cache=False).loss
            expected.backward()
            theirs.step(), theirs.zero_grad()
            say(f"step {step}: loss {loss.item():.6f} on {handle.ranks} ranks, {expected.item():.6f} alone")
            assert abs(loss.item() - expected.item()) < 1e-3
    handle.assert_used(passes=STEPS)
    say(f"step {step}: loss {loss.item():.6f}; the images of this batch are bands of its mask:")
    say(next(mask for name, mask in handle.session.masks.items() if "window" not in name))
    handle.disable()

    # Images that were not there in training, over pages. The second question about one image finds it in the cache.
    engine = span.Engine(model.eval(), pages=32, page_size=4)
    right = 0
    for corner in range(4):
        [answer] = engine.generate(
            [asked(torch.tensor([corner]), 1000 + corner)], span.SamplingParams(max_new_tokens=1)
        )
        say(f"bright corner {corner}: token {answer.token_ids[0]}, {ANSWERS[corner].item()} is right")
        right += answer.token_ids[0] == ANSWERS[corner]
    assert right >= 3
    engine.generate([asked(torch.tensor([3]), 1003)], span.SamplingParams(max_new_tokens=1))
    say(f"asked again: {engine.counts.cached} tokens were there already")
    assert engine.counts.cached >= 4


if __name__ == "__main__":
    launch(main)
