"""Functions of transformers' modeling files that mix tokens without attention, over ranks and over a step.

Recurrent mixers call functions of their file by name. Each is here by that name, with the arguments and the result of
the original, for the tokens of a rank, or those of an engine's step::

    causal_conv1d_fn               short convolutions: all recurrent mixers, LFM2
    torch_chunk_gated_delta_rule   Qwen3-Next, Qwen3.5, OLMo-Hybrid                  GatedDelta
    chunk_kimi_delta_attention     Kimi Linear, Ling                                 KDA
    mamba2_chunk_scan              Mamba2, Nemotron-H, Granite 4, Bamba, Falcon-H1   SSD
    mamba_selective_scan           Mamba, Jamba: a head of one channel for each      GLA
    lightning_attention            MiniMax, which has it in its forward              Lightning
    rg_lru_scan                    RecurrentGemma, the same                          GLA

The state begins anew with every document of the session. The originals do so only with packages that know packing, and
otherwise mix documents or raise.

[Note: compared] A file has its own copy of a function, and a later version may change what it computes. So a function
is served if its arguments are known here, and if it gives what ours does on a few tokens. It is compared once, on the
CPU, before a model is enabled.

Shapes: B batch rows, S tokens of a rank, C channels, H heads, K and V head dims, N state size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from attnspan.errors import ModelError
from attnspan.masks import Causal
from attnspan.parallel import ContextParallel
from attnspan.parallel.eager import eagerly
from attnspan.recurrence import GLA, KDA, SSD, GatedDelta, Lightning, Rule
from attnspan.testing import loopback
from attnspan.transports import Transport

PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")
"""Arguments that describe documents; those of a session come from its mask."""

HOW = {"chunk_size", "use_mambapy", "use_associative_scan"}
"""Arguments that say how a result is computed, not which."""

DECODING = {
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
    "mamba_selective_state_update",
}
"""Functions that continue a cache by one token. An enabled or served model has no cache, and never calls them."""

FUSED = {"mamba2_split_conv1d_scan_combined", "mamba_inner_fn"}
"""Functions that compute a whole mixer, or return None, after which it is computed step by step."""

MIN_GATE, FORGOTTEN = 1e-30, -30.0
"""The smallest gate of a state, and the logarithm of one that forgets it: what is left is below float32's precision."""

PADDING = "apply_mask_to_padding_states"

Result = Tensor | tuple[Tensor, None]
"""What these functions return: an output, or one and the final states, which nobody asks for."""

Caller = Callable[["MixerTokens"], Result]
Function = Callable[..., object]
Kwargs = dict[str, object]


class MixerTokens(Protocol):
    """What a recurrent mixer knows of the tokens that it is called with."""

    @property
    def padding(self) -> Tensor | None:
        """(B, S): 1 where tokens are, 0 in padding."""

    @property
    def called(self) -> set[tuple[str, str]]:
        """(mixer, function) of all that was called."""

    def recurrence(self, rule: Rule) -> Tensor:
        """The output of a rule."""

    def conv1d(self, channels_first: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A causal convolution of (B, C, S) by (C, width)."""


@dataclass(frozen=True, eq=False)
class ShardedTokens:
    """What recurrent mixers know of a forward pass over ranks."""

    session: ContextParallel
    padding: Tensor | None = None  # (B, S): 1 where tokens are, 0 in padding
    called: set[tuple[str, str]] = field(default_factory=set)  # (mixer, function)

    def recurrence(self, rule: Rule) -> Tensor:
        """The output of a rule for this rank's tokens."""
        out = self.session.recurrence(rule)
        assert isinstance(out, Tensor), "no final states were asked for"
        return out

    def conv1d(self, channels_first: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A convolution of this rank's tokens."""
        return self.session.conv1d(channels_first, weight, bias, dim=2)


class MixerFunctions:
    """The functions of a mixer, for the tokens of the `current` call. Names and arguments are transformers'."""

    def __init__(self, mixer: str, current: Callable[[], MixerTokens]):
        self.mixer, self.current = mixer, current

    def by_name(self, name: str) -> Function:
        """What a mixer calls in the place of a function of its file."""
        if name in FUSED:
            return _not_fused
        if name in DECODING:
            return functools.partial(self._decoded, name)
        return functools.partial(self._call, name)

    def tensor_by_name(self, name: str) -> Callable[..., Tensor]:
        """The same, of one that returns a tensor."""
        return functools.partial(self._tensor, name)

    def _tensor(self, name: str, *args: object, **kwargs: object) -> Tensor:
        return _first(self._call(name, *args, **kwargs))

    def _call(self, name: str, *args: object, **kwargs: object) -> Result:
        run = eagerly(MixerFunctions._run) if torch.compiler.is_compiling() else MixerFunctions._run
        return run(self, name, args, kwargs)

    def _run(self, name: str, args: tuple[object, ...], kwargs: Kwargs) -> Result:
        tokens = self.current()
        for each in PACKED:
            if kwargs.get(each) is not None:
                raise ModelError(
                    f"{self.mixer}: {name} was given {each}; documents of an enabled model are those of its batch, by "
                    "position_ids or cu_seq_lens_q"
                )
        tokens.called.add((self.mixer, name))
        return OURS[name](tokens, *args, **kwargs)

    def _decoded(self, name: str, *args: object, **kwargs: object) -> NoReturn:
        raise ModelError(f"{self.mixer} calls {name}, which continues a cache; there is none here")


def _not_fused(*args: object, **kwargs: object) -> None:
    return None


# ---- ours ------------------------------------------------------------------------------------------------------------


def apply_mask_to_padding_states(tokens: MixerTokens, hidden_states: Tensor, attention_mask: object) -> Tensor:
    """Zero in padding, (B, S, C), by what the batch says: the mask that a model makes is of one rank's tokens."""
    if tokens.padding is None:
        return hidden_states
    return (hidden_states * tokens.padding[:, :, None]).to(hidden_states.dtype)


def causal_conv1d_fn(
    tokens: MixerTokens,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **more: object,
) -> Tensor:
    """A convolution of (B, C, S) by (C, width)."""
    out = tokens.conv1d(hidden_states.to(weight.dtype), weight, bias)
    return (out if activation is None else ACT2FN[activation](out)).to(hidden_states.dtype)


def _delta_rule(
    rule: Callable[..., Rule],
    tokens: MixerTokens,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **more: object,
) -> tuple[Tensor, None]:
    """A delta rule: query and key (B, S, H, K), value (B, S, H, V), beta (B, S, H), g too, or of KDA (B, S, H, K)."""
    _check_states(initial_state, output_final_state)
    dtype = query.dtype
    if use_qk_l2norm_in_kernel:
        query, key = _normalized(query), _normalized(key)
    return tokens.recurrence(rule(query, key, value, g, beta)).to(dtype), None


def mamba2_chunk_scan(
    tokens: MixerTokens,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **more: object,
) -> Tensor:
    """Mamba2's scan: hidden_states (B, S, H, V), dt (B, S, H), A and D (H,), B and C (B, S, groups, N)."""
    _check_states(initial_states, return_final_states)
    dt = torch.clamp(_step(dt, dt_bias, dt_softplus), min=dt_limit[0], max=dt_limit[1])
    return tokens.recurrence(SSD(_wide(hidden_states), _wide(dt), _wide(A), B, C, None if D is None else _wide(D)))


def mamba_selective_scan(
    tokens: MixerTokens,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **more: object,
) -> Tensor:
    """Mamba's scan: hidden_states, dt and z (B, C, S), A (C, N), B and C (B, N, S), D (C,).

    Every channel is a head with values of one number, and its own decay for each of N.
    """
    _check_states(None, return_last_state)
    step = _wide(_step(dt.mT, delta_bias, delta_softplus))  # (B, S, C)
    keys, queries = B.mT.unsqueeze(2), C.mT.unsqueeze(2)  # one head for all
    values = (step * _wide(hidden_states.mT)).unsqueeze(-1)
    out = tokens.recurrence(GLA(queries, keys, values, step.unsqueeze(-1) * _wide(A), scale=1.0))
    out = out.squeeze(-1).mT.to(hidden_states.dtype)
    out = out if D is None else out + hidden_states * D[:, None]
    return out if z is None else out * F.silu(z)


def lightning_attention(tokens: MixerTokens, query: Tensor, key: Tensor, value: Tensor, slope_rate: Tensor) -> Tensor:
    """Linear attention of (B, S, H, K) that forgets by exp(-slope) a token: slope_rate is (H, 1, 1)."""
    return tokens.recurrence(Lightning(query, key, value, -slope_rate.flatten(), scale=1.0))


def rg_lru_scan(tokens: MixerTokens, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor) -> Tensor:
    """A state of each channel that is multiplied by its gate, or forgotten, before its input is added: (B, S, C).

    Every channel is a head with values of one number. A document begins without a state; what comes before a reset is
    padding.
    """
    kept = _wide(recurrent_gate).clamp(min=MIN_GATE).log()
    decay = (kept if tokens.padding is None else torch.where(reset, FORGOTTEN, kept)).unsqueeze(-1)
    ones = decay.new_ones(*decay.shape[:2], 1, 1)  # one head for all
    values = _wide(hidden_states).unsqueeze(-1)
    return tokens.recurrence(GLA(ones, ones, values, decay, scale=1.0)).squeeze(-1).to(hidden_states.dtype)


OURS: dict[str, Callable[..., Result]] = {
    each.__name__: each
    for each in (
        apply_mask_to_padding_states,
        causal_conv1d_fn,
        mamba2_chunk_scan,
        mamba_selective_scan,
        lightning_attention,
        rg_lru_scan,
    )
} | {
    "torch_chunk_gated_delta_rule": functools.partial(_delta_rule, GatedDelta),
    "chunk_kimi_delta_attention": functools.partial(_delta_rule, KDA),
}
SEQUENCE = OURS.keys() - {PADDING}
"""Functions that make a module a recurrent mixer."""

KNOWN = OURS.keys() | FUSED | DECODING
"""All that a mixer may call."""


def _check_states(initial: Tensor | None, final: bool) -> None:
    if initial is not None or final:
        raise ModelError("a recurrent layer was given a state, or asked for one; there is no cache here")


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Time steps, channels last, after bias and softplus."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _normalized(tensor: Tensor) -> Tensor:
    """Of length 1 in the last dim, in float32."""
    tensor = _wide(tensor)
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + 1e-6)


# ---- compared --------------------------------------------------------------------------------------------------------


def difference(name: str, theirs: Function) -> str | None:
    """How a function of a modeling file differs from ours; None if it does not. See [Note: compared]."""
    return _difference(name, inspect.unwrap(theirs))


@functools.cache
def _difference(name: str, theirs: Function) -> str | None:
    if name not in EXAMPLES:
        return None
    arguments = inspect.signature(OURS[name]).parameters.keys() | HOW
    for each in inspect.signature(theirs).parameters.values():
        if each.kind is not inspect.Parameter.VAR_KEYWORD and each.name not in arguments:
            return f"takes {each.name!r}"
    try:
        for example in EXAMPLES[name]():
            ours, original = functools.partial(OURS[name], **example), functools.partial(theirs, **example)
            mask = example.get("attention_mask")
            if not agrees(ours, original, mask if isinstance(mask, Tensor) else None):
                return "computes something else"
    except Exception as raised:  # whatever a version that changed it may raise
        return f"raises {type(raised).__name__} on a few tokens"
    return None


def agrees(ours: Caller, theirs: Callable[[], object], padding: Tensor | None = None) -> bool:
    """Whether a function of a pass of five tokens gives, on one rank, what another gives."""

    def rank(world: Transport) -> Tensor:  # a thread of its own: this may be one of other virtual ranks
        return _first(ours(ShardedTokens(ContextParallel(world, seq_len=5, mask=Causal()), padding)))

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        (found,) = loopback(1).run(rank)
        expected = _first(theirs())
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def _first(result: object) -> Tensor:
    found = result[0] if isinstance(result, tuple) else result
    assert isinstance(found, Tensor), "these functions return tensors"
    return found


class _Drawn:
    """Random numbers of its own, in float32 on the CPU."""

    def __init__(self) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float32, device="cpu")


def _padded() -> list[Kwargs]:
    drawn = _Drawn()
    return [{"hidden_states": drawn(2, 5, 3), "attention_mask": (drawn(2, 5) > 0).long()}]


def _convolutions() -> list[Kwargs]:
    drawn = _Drawn()
    given = {"hidden_states": drawn(2, 3, 5), "weight": drawn(3, 4), "bias": drawn(3)}
    return [given | {"activation": "silu"}, given | {"bias": None}]


def _deltas(channels: tuple[int, ...]) -> list[Kwargs]:
    drawn = _Drawn()
    given = {"query": drawn(2, 5, 2, 4), "key": 0.5 * drawn(2, 5, 2, 4), "value": drawn(2, 5, 2, 3)}
    given |= {"g": -F.softplus(drawn(2, 5, 2, *channels)), "beta": drawn(2, 5, 2).sigmoid()}
    return [given | {"use_qk_l2norm_in_kernel": normalized} for normalized in (True, False)]


def _scans() -> list[Kwargs]:
    drawn = _Drawn()
    given: Kwargs = {"hidden_states": drawn(2, 5, 4, 3), "dt": drawn(2, 5, 4), "A": -drawn(4).exp()}
    given |= {"B": drawn(2, 5, 2, 3), "C": drawn(2, 5, 2, 3), "D": drawn(4), "dt_bias": drawn(4), "chunk_size": 3}
    return [given | {"dt_softplus": True, "dt_limit": (0.1, 2.0)}]


def _selective_scans() -> list[Kwargs]:
    drawn = _Drawn()
    given = {"hidden_states": drawn(2, 4, 5), "dt": drawn(2, 4, 5), "A": -drawn(4, 3).exp(), "B": drawn(2, 3, 5)}
    given |= {"C": drawn(2, 3, 5), "D": drawn(4), "z": drawn(2, 4, 5), "delta_bias": drawn(4)}
    return [given | {"delta_softplus": True}]


EXAMPLES: Mapping[str, Callable[[], list[Kwargs]]] = {
    PADDING: _padded,
    "causal_conv1d_fn": _convolutions,
    "torch_chunk_gated_delta_rule": functools.partial(_deltas, ()),
    "chunk_kimi_delta_attention": functools.partial(_deltas, (4,)),
    "mamba2_chunk_scan": _scans,
    "mamba_selective_scan": _selective_scans,
}
