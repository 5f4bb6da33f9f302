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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnspan import testing
from attnspan._version import __version__
from attnspan.attention import Attention, attention
from attnspan.errors import (
    AttentionError,
    AttnspanError,
    EngineBusy,
    EngineClosed,
    EngineError,
    ExpressionError,
    KernelError,
    LayoutError,
    MaskError,
    ModelError,
    PageError,
    PlanError,
    PoolExhausted,
    RankError,
    RecurrenceError,
    ShardError,
    StepFailed,
    TransportError,
    TuningError,
    UnknownRequest,
    UnknownSequence,
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
    TokenGroups,
    Tree,
)
from attnspan.paged import AfterPrefix, PageAllocator, PageLayer, PagePool, PrefixCache, ShardedPages, StepPlan
from attnspan.parallel import ContextParallel, check_model
from attnspan.plan import Hardware, Plan, RecurrentLayers, Shape, choose
from attnspan.recurrence import GLA, KDA, SSD, Affine, GatedDelta, Lightning

if TYPE_CHECKING:
    from attnspan.engine import SamplingParams
    from attnspan.generation import Engine
    from attnspan.integrations.huggingface import enable
    from attnspan.parallel import ContextParallelStyle

__all__ = [
    "GLA",
    "KDA",
    "SSD",
    "Affine",
    "AfterPrefix",
    "Attention",
    "AttentionError",
    "AttnspanError",
    "Balanced",
    "BlockSparse",
    "Causal",
    "Chunked",
    "ContextParallel",
    "ContextParallelStyle",
    "Contiguous",
    "Documents",
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "EngineError",
    "ExpressionError",
    "Full",
    "GatedDelta",
    "Hardware",
    "HeadTail",
    "KernelError",
    "KeyPadding",
    "Layout",
    "LayoutError",
    "Lightning",
    "Mask",
    "MaskError",
    "MaskMod",
    "ModelError",
    "PageAllocator",
    "PageError",
    "PageLayer",
    "PagePool",
    "PerDocument",
    "Plan",
    "PlanError",
    "PoolExhausted",
    "PrefixCache",
    "PrefixLM",
    "RankError",
    "RecurrenceError",
    "RecurrentLayers",
    "RoundRobinByWork",
    "SamplingParams",
    "Shape",
    "ShardError",
    "ShardedPages",
    "SinkTokens",
    "SlidingWindow",
    "StepFailed",
    "StepPlan",
    "Striped",
    "TokenGroups",
    "TransportError",
    "Tree",
    "TuningError",
    "UnknownRequest",
    "UnknownSequence",
    "__version__",
    "attention",
    "check_model",
    "choose",
    "enable",
    "testing",
]


_WHERE_LAZY = {
    "ContextParallelStyle": "attnspan.parallel",  # see parallel/__init__.py
    "Engine": "attnspan.generation",
    "SamplingParams": "attnspan.engine",
    "enable": "attnspan.integrations.huggingface",  # imports transformers
}


def __getattr__(name: str) -> Any:
    if name in _WHERE_LAZY:  # imported when it is asked for
        return getattr(import_module(_WHERE_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
