"""A fingerprint differs as soon as anything that a function reads does, or there is none."""

import functools
import math
import random
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import and_masks

from attnspan.masks import MaskMod
from attnspan.masks.fingerprint import fingerprint

WINDOWS = torch.tensor([2, 5, 11, 40])
WINDOW = 3


def reading(cell=0.1, default=1.0):
    """A score_mod that reads a global, a cell and a default."""

    def score_mod(score, b, h, q_idx, kv_idx, shift=default):
        return torch.tanh(score) - cell * (q_idx - kv_idx) + shift + WINDOWS[h]

    return score_mod


def test_a_fingerprint_is_that_of_everything_a_function_reads():
    cell = torch.ones(3)
    assert fingerprint(reading()) == fingerprint(reading()) != None  # noqa: E711
    assert fingerprint(reading(cell=0.0)) != fingerprint(reading(cell=-0.0))
    assert fingerprint(reading(cell=0.2)) != fingerprint(reading())
    assert fingerprint(reading(default=2.0)) != fingerprint(reading())
    one = fingerprint(reading(cell=cell))
    assert fingerprint(reading(cell=cell)) == one
    assert fingerprint(reading(cell=torch.ones(3))) != one
    cell.data = torch.ones(4)
    assert fingerprint(reading(cell=cell)) != one


@dataclass
class Settings:
    width: int

    def near(self, distance):
        return distance < self.width


class Base:
    width = 3


class Derived(Base):
    def mask(self, b, h, q, k):
        return q - k < self.width

    def __call__(self, b, h, q, k):
        return self.mask(b, h, q, k)


def helper(distance):
    return distance < WINDOW


class Cases:
    """Each returns a function, and what changes something that it reads."""

    @staticmethod
    def a_class_attribute():
        return lambda b, h, q, k: q - k < Base.width, lambda: setattr(Base, "width", Base.width + 1)

    @staticmethod
    def an_inherited_attribute():
        return Derived().mask, lambda: setattr(Base, "width", Base.width + 1)

    @staticmethod
    def an_object_that_is_called():
        each = Derived()
        return each, lambda: setattr(each, "width", 9)

    @staticmethod
    def an_attribute_read_by_a_method():
        settings = Settings(3)
        return lambda b, h, q, k: settings.near(q - k), lambda: setattr(settings, "width", 4)

    @staticmethod
    def a_namespace():
        space = SimpleNamespace(width=3)
        return lambda b, h, q, k: q - k < space.width, lambda: setattr(space, "width", 4)

    @staticmethod
    def a_dict_inside_a_list():
        values = [{"width": 3}]
        return lambda b, h, q, k: q - k < values[0]["width"], lambda: values[0].update(width=4)

    @staticmethod
    def a_global_of_a_function_that_it_calls():
        return lambda b, h, q, k: helper(q - k), lambda: globals().update(WINDOW=WINDOW + 1)

    @staticmethod
    def a_global_of_a_function_inside():
        def mask(b, h, q, k):
            def near(distance):
                return distance < WINDOW

            return near(q - k)

        return mask, lambda: globals().update(WINDOW=WINDOW + 1)

    @staticmethod
    def an_argument_of_a_partial():
        space = SimpleNamespace(width=3)
        return functools.partial(lambda b, h, q, k, s: q - k < s.width, s=space), lambda: setattr(space, "width", 4)

    @staticmethod
    def a_mask_of_and_masks():
        width = [3]
        fn = and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < width[0])
        return fn, lambda: width.__setitem__(0, 4)

    @staticmethod
    def a_method_that_was_replaced():
        settings = Settings(3)
        return lambda b, h, q, k: settings.near(q - k), lambda: setattr(settings, "near", lambda x: x < 9)

    @staticmethod
    def an_attribute_of_a_function():
        def mask(b, h, q, k):
            return q - k < mask.width

        mask.width = 3
        return mask, lambda: setattr(mask, "width", 4)


@pytest.mark.parametrize("case", [name for name in vars(Cases) if not name.startswith("_")])
def test_what_a_function_reads_through_others_is_in_its_fingerprint(case):
    fn, change = getattr(Cases, case)()
    before = fingerprint(fn)
    assert before is not None
    assert fingerprint(fn) == before
    change()
    assert fingerprint(fn) != before


def test_attributes_that_the_code_does_not_name_do_not_matter():
    each = Derived()
    each.unread = object()
    fn = each.mask
    before = fingerprint(fn)
    assert before is not None
    each.other = 3
    assert fingerprint(fn) == before


def importing(score, b, h, q_idx, kv_idx):
    import math

    return score * math.pi


class Slotted:
    __slots__ = ("width",)

    def __init__(self):
        self.width = 3


class Clever:
    @property
    def width(self):
        return random.randint(1, 9)


SLOTTED, CLEVER = Slotted(), Clever()
MARKED = torch.ones(3)
MARKED.note = 3
COUNT = [0]


def counting(score, b, h, q, k):
    global WINDOW
    WINDOW = 4
    return score


@pytest.mark.parametrize(
    "fn",
    {
        "imports": importing,
        "module": nn.Identity(),
        "method of a module": nn.Identity().forward,
        "property": lambda s, b, h, q, k: s * CLEVER.width,
        "slots": lambda s, b, h, q, k: s * SLOTTED.width,
        "getattr": lambda s, b, h, q, k: s * getattr(SLOTTED, "width"),  # noqa: B009
        "vars": lambda s, b, h, q, k: s * vars(COUNT)["width"],
        "globals": lambda s, b, h, q, k: s * globals()["WINDOW"],
        "__dict__": lambda s, b, h, q, k: s * Settings(3).__dict__["width"] * SLOTTED.width,
        "clock": lambda s, b, h, q, k: s * time.time(),
        "random": lambda s, b, h, q, k: s * random.random(),
        "iterator": reading(cell=iter([1.0, 2.0])),
        "state of torch": lambda s, b, h, q, k: s * torch.get_num_threads(),
        "module of torch": lambda s, b, h, q, k: s * torch.backends.cuda.matmul.allow_tf32,
        "changes a global": counting,
        "attribute of a tensor": lambda s, b, h, q, k: s * MARKED.note,
        "builtin of an object": reading(cell=COUNT.pop),
        "very many values": reading(cell=list(range(5000))),
        "numpy": reading(cell=torch.ones(1).numpy()),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_what_may_read_anything_else_has_no_fingerprint(fn):
    assert fingerprint(fn[1]) is None


def test_libraries_mean_what_they_mean():
    assert fingerprint(lambda s, b, h, q, k: F.softplus(s) * math.pi + max(1, abs(-2))) is not None
    assert fingerprint(MaskMod(lambda b, h, q, k: q >= k).mask_mod()) is not None
