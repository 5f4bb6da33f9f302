"""Masks: what attends to what, as data. See mask.py for the idea, band.py for what they are made of."""

from attnspan.masks.band import Band
from attnspan.masks.block_sparse import BlockSparse
from attnspan.masks.causal import Causal
from attnspan.masks.chunked import Chunked
from attnspan.masks.documents import Documents
from attnspan.masks.full import Full
from attnspan.masks.key_padding import KeyPadding
from attnspan.masks.mask import Mask
from attnspan.masks.mask_mod import MaskMod
from attnspan.masks.prefix_lm import PrefixLM
from attnspan.masks.sink_tokens import SinkTokens
from attnspan.masks.sliding_window import SlidingWindow
from attnspan.masks.token_groups import TokenGroups
from attnspan.masks.tree import Tree

__all__ = [
    "Band",
    "BlockSparse",
    "Causal",
    "Chunked",
    "Documents",
    "Full",
    "KeyPadding",
    "Mask",
    "MaskMod",
    "PrefixLM",
    "SinkTokens",
    "SlidingWindow",
    "TokenGroups",
    "Tree",
]
