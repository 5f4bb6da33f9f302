"""Context-parallel attention and paged KV caches for PyTorch, exact or refused.

>>> import attnspan as span
>>> mask = span.Causal() & span.Documents([3, 5])
>>> print(span.Plan(mask, span.Balanced(mask, ranks=2, chunk=1), seq_len=8, strategy="needed"))
Causal() & Documents([3, 5]), 8 tokens, Balanced(Causal() & Documents([3, 5]), ranks=2, chunk=1), needed(1)
rank  tokens  runs  steps  full  causal  general  share  receives  peak keys
0          4     2      1     1       1        0  52.4%         4          8
1          4     1      1     0       1        0  47.6%         0          4
imbalance 1.048; 4 keys move (50% of an all-gather's)
"""

from attnspan import testing
from attnspan._version import __version__
from attnspan.attention import Attention, attention
from attnspan.errors import (
    AttentionError,
    AttnspanError,
    ExpressionError,
    KernelError,
    LayoutError,
    MaskError,
    PlanError,
    ShardError,
    TransportError,
)
from attnspan.layouts import (
    Balanced,
    Contiguous,
    HeadTail,
    Layout,
    PerDocument,
    RoundRobinByWork,
    Striped,
)
from attnspan.masks import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    Full,
    KeyPadding,
    Mask,
    MaskMod,
    PrefixLM,
    SinkTokens,
    SlidingWindow,
    Tree,
)
from attnspan.parallel import ContextParallel
from attnspan.plan import Hardware, Plan, Shape, choose

__all__ = [
    "Attention",
    "AttentionError",
    "AttnspanError",
    "Balanced",
    "BlockSparse",
    "Causal",
    "Chunked",
    "ContextParallel",
    "Contiguous",
    "Documents",
    "ExpressionError",
    "Full",
    "Hardware",
    "HeadTail",
    "KernelError",
    "KeyPadding",
    "Layout",
    "LayoutError",
    "Mask",
    "MaskError",
    "MaskMod",
    "PerDocument",
    "Plan",
    "PlanError",
    "PrefixLM",
    "RoundRobinByWork",
    "Shape",
    "ShardError",
    "SinkTokens",
    "SlidingWindow",
    "Striped",
    "TransportError",
    "Tree",
    "__version__",
    "attention",
    "choose",
    "testing",
]
