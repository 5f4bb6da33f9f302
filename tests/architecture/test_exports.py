"""The public names are the ones written here: a name comes or goes in a change that says so."""

import inspect
from dataclasses import dataclass
from types import SimpleNamespace

import attnspan

PUBLIC = [
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
    "GLA",
    "GatedDelta",
    "Hardware",
    "HeadTail",
    "KDA",
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
    "SSD",
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


def undocumented(names, namespace):
    """Names without a docstring of their own. A plain value, such as the version, has none to write."""
    found = {name: getattr(namespace, name) for name in names}
    spoken = {name: it for name, it in found.items() if inspect.isclass(it) or inspect.ismodule(it) or callable(it)}
    return [name for name, it in spoken.items() if not own_doc(it)]


def own_doc(it):
    # A dataclass without a docstring is given its signature for one, and a subclass shows its parent's.
    doc = vars(it).get("__doc__") if inspect.isclass(it) else it.__doc__
    return doc if doc and not doc.startswith(f"{getattr(it, '__name__', '')}(") else None


def test_the_public_names_are_the_committed_list():
    assert sorted(attnspan.__all__) == PUBLIC


def test_every_public_name_exists():
    assert [name for name in PUBLIC if not hasattr(attnspan, name)] == []


def test_every_public_name_has_a_docstring():
    assert undocumented(PUBLIC, attnspan) == []


def test_twin_a_name_without_a_docstring_of_its_own_is_found():
    class Parent:
        """Said of the parent."""

    class Silent(Parent):
        pass

    @dataclass
    class Generated:
        ranks: int

    def mute():
        pass

    planted = SimpleNamespace(Parent=Parent, Silent=Silent, Generated=Generated, mute=mute, version="1")
    assert undocumented(vars(planted), planted) == ["Silent", "Generated", "mute"]
