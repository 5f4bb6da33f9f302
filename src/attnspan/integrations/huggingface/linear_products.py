"""Linear layers of a served model by products of few rows (small_products.py), in calls that a CUDA graph captures.

For one call of the model in one thread, `F.linear` is another function. Whoever calls it gets the product of the
tensors that were passed: modules, hooks, adapters and weights stay the model's own, and nothing is set on them.

    F.linear(x, weight, bias)    `product`, or one of `products` (see below)
    an MLP (fused_modules.py)    `gated_product`, and `product` with the layer's sum
    anything else                torch's, as is every call that these do not support

[Note: one launch] Queries, keys and values are products of one x, and so are gates and what they multiply. The first of
them computes all, and the results of the others are kept for the calls that follow. Such a call takes its result if it
passes the same tensors, x, weight and bias, and none of them was written since, which versions tell. Writes by other
libraries' kernels and through `.data` have none, so that asking for the memory of any of them drops what is kept. A
result is taken once, and dropped with the call of the model. A module that does not take what was kept for it is
computed part by part from then on.

[Note: captured calls] A graph is captured after calls that warm up. In these each product is compared with torch's on
the model's own numbers. After one that differs by more than rounding, the engine leaves all products to torch. In other
calls they would not help: there the host is slower than the device, and launches a kernel of torch sooner.

Shapes: R rows, N and K of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import DeviceContext

from attnspan.assumptions import Assumption
from attnspan.errors import AttnspanError
from attnspan.integrations.huggingface.classes import is_compiled
from attnspan.integrations.huggingface.fused_kernels import gated
from attnspan.integrations.huggingface.small_products import gated_product, product, products, runs_on

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of Linear layers that a module gives the same x, in the order of their calls."""

_PROPERTIES: tuple[Any, ...] = (Tensor.data, Tensor.__cuda_array_interface__)

UNSEEN = (
    *(each.__get__ for each in _PROPERTIES), *(each.__set__ for each in _PROPERTIES), Tensor.data_ptr, Tensor.storage,
    Tensor.untyped_storage, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__,
)  # fmt: skip
"""Ways to a tensor's memory by which it is written without a new version."""

Function = Callable[..., object]
Args = tuple[object, ...]
Kwargs = Mapping[str, object]
P = ParamSpec("P")
T = TypeVar("T")


class _Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[object] = []

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def _sees_memory() -> bool:
    x = torch.ones(1, 2, device="cpu")
    with _Seen() as seen:
        F.linear(x, x)
        x.data = x.data
        ways = x.data_ptr(), x.untyped_storage(), x.numpy(), x.__array__(), x.__dlpack__()
    known = [each for each in UNSEEN if each in seen.functions]
    return F.linear in seen.functions and len(known) == len(ways) + 2


MODE_SEES = Assumption(
    "a torch function mode sees F.linear and who asks for a tensor's memory",
    "integrations/huggingface/linear_products.py",
    "methods and properties of `torch.Tensor`",
    _sees_memory,
)


def _sees() -> bool:
    """Whether results can be kept; without it, all products are torch's."""
    try:
        MODE_SEES.verify()
    except AttnspanError:
        return False
    return True


class LinearProducts:
    """The products of one engine's model, over all calls: which modules are left apart, and whether all have agreed."""

    def __init__(self, model: nn.Module) -> None:
        weight = next(model.parameters())
        self.model, self.runs = model, runs_on(weight.device, weight.dtype) and _sees()
        self.apart: WeakSet[nn.Module] = WeakSet()
        self.agreed = True  # with torch's, so far

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function, in which `F.linear` is ours where that can be."""
        around = _get_current_function_mode()
        other = around is not None and not isinstance(around, DeviceContext)
        if not (self.runs and self.agreed) or other or any(map(is_compiled, self.model.modules())):
            return function(*args, **kwargs)
        call, context = ProductCall(self), copy_context()
        context.run(_CURRENT.set, call)
        with call:
            result = context.run(function, *args, **kwargs)
        call.drop()
        return result


class ProductCall(TorchFunctionMode):
    """One call of the model. An interrupt may leave it with its thread: it is used in its own context alone."""

    def __init__(self, owner: LinearProducts) -> None:
        super().__init__()
        self._owner = owner
        self._groups = {id(group.weights[0]): group for group in _groups(owner.model, owner.apart)}
        self._kept = dict[int, _Kept]()  # by the id of a weight, which it holds
        self._memory = frozenset[int]()  # of all tensors that results are kept for

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if _CURRENT.get() is self:
            given = [each for each in args if isinstance(each, Tensor)]
            if func is F.linear and not kwargs and len(given) == sum(each is not None for each in args):
                found = self._linear(*given)
                if found is not None:
                    return found
            elif self._kept and func in UNSEEN and _memory_of(given[0]) in self._memory:
                self.drop()
        return func(*args, **(kwargs or {}))

    def gated(self, module: nn.Module, activation: str, x: Tensor) -> Tensor | None:
        """act(gate) * up of an MLP, if there is a kernel for it and nothing watches its parts."""
        parts = [part for name in ("gate_up_proj", "gate_proj", "up_proj") if (part := module._modules.get(name))]
        if not all(_is_plain(part) and part._parameters["bias"] is None for part in parts):
            return None
        weights, halves = [_weight(part) for part in parts], 3 - len(parts)
        if not self._is_for(x, *weights):
            return None
        gate, up = (half for weight in weights for half in weight.chunk(halves))

        def wanted() -> Tensor:
            gate, up = (half for part in parts for half in part(x).chunk(halves, dim=-1))
            return gated(gate, up, activation)

        return self._checked(gated_product(x, gate, up, activation), wanted)

    def down(self, linear: nn.Module | None, x: Tensor, residual: Tensor) -> Tensor | None:
        """residual + linear(x), if there is a kernel for it and nothing watches the layer."""
        if linear is None or not _is_plain(linear):
            return None
        weight, bias = _weight(linear), linear._parameters["bias"]
        if not self._is_for(x, weight, bias, residual):
            return None
        return self._checked(product(x, weight, bias, residual), lambda: residual + linear(x))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if not self._is_for(x, weight, bias):
            return None
        found = self._take(x, weight, bias)
        if found is None:
            found = self._together(x, weight, bias)
        if found is None:
            found = product(x, weight, bias)
        return self._checked(found, lambda: F.linear(x, weight, bias))

    def _is_for(self, x: Tensor, *others: Tensor | None) -> bool:
        """Whether a call is on plain tensors, and torch would neither record nor cast it."""
        plain = all(type(each) in (Tensor, nn.Parameter) for each in (x, *others) if each is not None)
        return (
            plain
            and self._owner.agreed
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(x.device.type)
        )

    def _take(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The result that is kept for a call. See [Note: one launch]."""
        kept = self._kept.pop(id(weight), None)
        if kept is None:
            return None
        if kept.is_of(x, weight, bias):
            return kept.result
        self._owner.apart.add(kept.module)
        return None

    def _together(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The result of the first of some layers; those of the others are kept."""
        group = self._groups.get(id(weight))
        if group is None or group.module in self._owner.apart or group.biases[0] is not bias:
            return None
        biases = [each for each in group.biases if each is not None]
        given = (x, *group.weights, *biases)
        if not self._is_for(*given) or any(each.is_inference() for each in given):  # these have no versions
            return None
        found = products(x, group.weights, biases or None)
        if found is None:
            return None
        self.drop()
        others = zip(group.weights[1:], group.biases[1:], found[1:], strict=True)
        self._kept = {id(each): _Kept.of(group.module, (x, each, own), result) for each, own, result in others}
        self._memory = frozenset(map(_memory_of, given))
        return found[0]

    def drop(self) -> None:
        """Forget what is kept: it was not taken."""
        self._owner.apart.update(kept.module for kept in self._kept.values())
        self._kept = {}

    def _checked(self, found: Tensor | None, wanted: Callable[[], Tensor]) -> Tensor | None:
        """A product; before a capture torch's, if that is another one. See [Note: captured calls]."""
        if found is None or (found.is_cuda and torch.cuda.is_current_stream_capturing()):
            return found
        context = copy_context()
        context.run(_CURRENT.set, None)
        expected = context.run(wanted)
        if agree(found, expected):
            return found
        self._owner.agreed = False
        return expected


_CURRENT: ContextVar[ProductCall | None] = ContextVar("the products of the call under way", default=None)


def current_products() -> ProductCall | None:
    """Those of the call under way."""
    return _CURRENT.get()


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether rows differ by no more than a few roundings of their numbers."""
    if found.shape != expected.shape or not torch.equal(found.isfinite(), expected.isfinite()):
        return False
    dtype = expected.dtype
    found, expected = (each.float().nan_to_num(0.0, 0.0, 0.0) for each in (found, expected))
    apart, size = (each.norm(dim=-1) for each in (found - expected, expected))
    return bool((apart <= 4 * torch.finfo(dtype).eps * size).all())


class _Group(NamedTuple):
    """Linear layers of one module that are given the same x."""

    module: nn.Module
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]  # all, or none


class _Kept(NamedTuple):
    """A result for a call with these tensors, as they were."""

    module: nn.Module
    tensors: tuple[Tensor | None, ...]
    versions: list[int | None]
    result: Tensor

    @classmethod
    def of(cls, module: nn.Module, tensors: tuple[Tensor | None, ...], result: Tensor) -> _Kept:
        return cls(module, tensors, _versions(tensors), result)

    def is_of(self, *given: Tensor | None) -> bool:
        same = all(each is mine for each, mine in zip(given, self.tensors, strict=True))
        return same and _versions(given) == self.versions


def _versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if each is None else each._version for each in tensors]


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _groups(model: nn.Module, apart: WeakSet[nn.Module]) -> Iterator[_Group]:
    for module in model.modules():
        for names in TOGETHER if module not in apart else ():
            parts = [part for part in map(module._modules.get, names) if type(part) is nn.Linear]
            weights = [weight for part in parts if (weight := part._parameters.get("weight")) is not None]
            biases = [part._parameters.get("bias") for part in parts]
            if len(weights) == len(names) and len({bias is None for bias in biases}) == 1:
                yield _Group(module, weights, biases)


def is_watched(module: nn.Module) -> bool:
    """Whether hooks would see a call of a module."""
    own = module._forward_hooks or module._forward_pre_hooks
    return bool(own or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _is_plain(part: nn.Module) -> bool:
    """Whether to call a module is to call F.linear with its weight and bias, and nothing else."""
    own = type(part) is nn.Linear and "forward" not in vars(part) and part._parameters.get("weight") is not None
    return own and "bias" in part._parameters and not is_watched(part)


def _weight(part: nn.Module) -> Tensor:
    weight = part._parameters["weight"]
    assert weight is not None, "it is a plain layer"
    return weight
