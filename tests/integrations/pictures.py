"""Images for any small image-text model: the first of a few forms that it takes, among as many tokens as it wants."""

import inspect

import torch

IMAGE, START, END = 60, 61, 62
IDS = {"image_token_id": IMAGE, "image_token_index": IMAGE, "image_patch_id": IMAGE}
IDS |= {"vision_start_token_id": START, "image_start_token_id": START}
IDS |= {"vision_end_token_id": END, "image_end_token_id": END}
COUNTS = (*range(1, 21), 24, 25, 36, 49)
TYPES = ("mm_token_type_ids", "token_type_ids")


def number_tokens(config):
    """Give the special tokens of a config numbers that a small vocabulary has."""
    for name, value in list(vars(config).items()):
        if name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= IMAGE:
            setattr(config, name, 50 + len(name) % 8)
    for name, number in IDS.items():
        if hasattr(config, name):
            setattr(config, name, number)


def pictures(model):
    """A batch of text with two images that a model takes; None if it takes none of these."""
    parameters = inspect.signature(type(model).forward).parameters
    for seen in _forms(model, torch.Generator().manual_seed(5)):
        if any(name not in parameters for name in seen):
            continue
        for count in COUNTS:
            tokens = _tokens(count)
            types = {name: (tokens == IMAGE).long() for name in TYPES if name in parameters}
            given = {"input_ids": tokens} | types | seen
            try:
                with torch.no_grad():
                    model(**given, use_cache=False)
            except Exception:  # whatever a model says to images that are not its own
                continue
            return given
    return None


def _tokens(count):
    tokens = torch.randint(3, 50, (1, 2 * count + 9), generator=torch.Generator().manual_seed(1))
    for first in (2, 4 + count):
        tokens[0, first], tokens[0, first + 1 + count] = START, END
        tokens[0, first + 1 : first + 1 + count] = IMAGE
    return tokens


def _forms(model, drawn):
    """Two images, as processors of one family or another return them."""
    vision = getattr(model.config, "vision_config", None) or model.config
    size, patch = (_first(getattr(vision, name, None)) for name in ("image_size", "patch_size"))
    patch, frames = patch or 14, getattr(vision, "temporal_patch_size", None) or 1

    def noise(*shape):
        return torch.randn(*shape, generator=drawn)

    for side in dict.fromkeys(filter(None, (size, 2 * patch, 4 * patch))):
        yield {"pixel_values": noise(2, 3, side, side)}
        yield {"pixel_values": noise(2, 3, side, side), "image_sizes": torch.tensor([[side, side]] * 2)}
        yield {"pixel_values": noise(1, 2, 3, side, side)}
    for side in (2, 4):
        many, grid = 2 * side * side, torch.tensor([[1, side, side]] * 2)
        for width in dict.fromkeys((3 * frames * patch**2, 3 * patch**2)):
            yield {"pixel_values": noise(many, width), "image_grid_thw": grid}
        yield {"pixel_values": noise(many, 3, patch, patch), "image_grid_thw": grid}
        yield {
            "pixel_values": noise(2, side * side, 3 * patch**2),
            "pixel_attention_mask": torch.ones(2, side * side).long(),
            "spatial_shapes": grid[:, 1:],
        }


def _first(size):
    return size[0] if isinstance(size, list | tuple) else size
