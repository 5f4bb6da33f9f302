"""Handlers answer the calls that a block intercepts: with a session's attention, or with an error.

A handler has one method for SDPA and one for flex_attention. Calls come in one of three ways, which are an argument
([Note: ways of entry] in guards.py). nn.MultiheadAttention is run by code that calls SDPA (multihead.py).

[Note: refused together] A rank that raised alone would leave the others waiting for its keys. So in eager code all
ranks raise together if tensors of such shapes come for the first time, when ranks agree anyway
(attention/agreement.py). After that a rank raises alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import NoReturn

from torch import Tensor

from attnspan.attention import Attention
from attnspan.attention.agreement import refuse
from attnspan.attention.inputs import Inputs
from attnspan.errors import AttentionError, AttnspanError
from attnspan.parallel.attentions import Attentions
from attnspan.parallel.call_args import FlexArgs, FlexResult, SdpaArgs, as_4d, sdpa_args
from attnspan.parallel.dtensors import is_dtensor
from attnspan.parallel.flex import flex_attention
from attnspan.parallel.guards import Entry, Guards, guarded, guards_of
from attnspan.parallel.multihead import multi_head_attention
from attnspan.parallel.run_attention import run_attention
from attnspan.parallel.sdpa_checks import SdpaChecks


class Handler(ABC):
    """Answers intercepted calls. Made in eager code, before compiled code uses it."""

    @abstractmethod
    def sdpa(self, entry: Entry, args: SdpaArgs) -> Tensor:
        """F.scaled_dot_product_attention."""

    @abstractmethod
    def flex(self, entry: Entry, args: FlexArgs) -> FlexResult:
        """flex_attention."""

    @cached_property
    def multi_head(self) -> Callable[..., object]:
        """F.multi_head_attention_forward, in eager code."""
        return multi_head_attention(lambda *args, **kwargs: self.sdpa("eager", sdpa_args(*args, **kwargs)))


class SessionHandler(Handler):
    """A session's attention. SDPA uses the mask called `name`; with None, it is refused."""

    def __init__(self, attentions: Attentions, name: str | None, guards: Guards | None = None):
        self.spec, self.attentions, self.name = attentions.spec, attentions, name
        self.guards = guards_of(self.spec) if guards is None else guards
        if name is not None:
            attend = attentions.named[name]
            self.by_entry, self.sdpa_checks = guarded(attend, self.guards), SdpaChecks(self.spec, attend.plan)
            self._scaled: dict[float, Attention] = {}

    def flex(self, entry: Entry, args: FlexArgs) -> FlexResult:
        if entry == "eager":
            self.guards["eager"]()
        return flex_attention(self.attentions, args, self.name, entry)

    def sdpa(self, entry: Entry, args: SdpaArgs) -> Tensor:
        """SDPA under the mask of this handler."""
        if self.name is None:
            names = " or ".join(f"mask={name!r}" for name in self.spec.masks)
            raise AttentionError(f"F.scaled_dot_product_attention has no mask inside this cp.flex(); give it {names}")
        attend = self._eager_attention(args) if entry == "eager" else self._compiled_attention(entry, args)
        return self._run(attend, args)

    def _compiled_attention(self, entry: Entry, args: SdpaArgs) -> Attention:
        """The attention for a call in compiled code, whose arguments are checked."""
        self.check_sdpa(args)
        if not self.sdpa_checks.has_usual_scale(args):
            raise AttentionError(
                f"scale must be the session's under torch.compile, got {args.scale}; make it with "
                "ContextParallel(..., scale=...)"
            )
        return self.by_entry[entry]

    def _eager_attention(self, args: SdpaArgs) -> Attention:
        """The attention for a call in eager code, whose tensors and arguments are checked."""
        for tensor in args[:3]:
            self.spec.sharding.check_mark(tensor)
        attend = self.by_entry["eager"] if self.sdpa_checks.has_usual_scale(args) else self._with_scale(args)
        try:
            self.check_sdpa(args)
        except AttentionError as wrong:
            self.refuse_together(attend, args, wrong)
        self.guards["eager"]()
        return attend

    def _with_scale(self, args: SdpaArgs) -> Attention:
        assert args.scale is not None, "None is the usual one"
        if args.scale not in self._scaled:
            self._scaled[args.scale] = self.by_entry["eager"].variant(scale=args.scale)
        return self._scaled[args.scale]

    def _run(self, attend: Attention, args: SdpaArgs) -> Tensor:
        query, key, value = args[:3]
        if query.dim() == 4:
            return run_attention(self.spec, attend, Inputs(query, key, value, dropout_p=args.dropout_p))[0]
        out, _ = attend.run(Inputs(as_4d(query), as_4d(key), as_4d(value), dropout_p=args.dropout_p))
        return out.reshape(*query.shape[:-1], value.shape[-1])

    def check_sdpa(self, args: SdpaArgs) -> None:
        """Refuse arguments that the session's attention does not have. torch_compat overrides it."""
        self.sdpa_checks.check_args(args)

    def refuse_together(self, attend: Attention, args: SdpaArgs, wrong: AttentionError) -> NoReturn:
        """Raise an error. See [Note: refused together]."""
        if all(isinstance(x, Tensor) and x.dim() > 1 and not is_dtensor(x) for x in args[:3]):
            inputs = Inputs(as_4d(args.query), as_4d(args.key), as_4d(args.value), dropout_p=args.dropout_p)
            try:
                call = attend.bound.for_inputs(inputs)
            except AttnspanError:  # there is no plan for such tensors, on which all could agree
                raise wrong from None
            refuse(call, inputs, wrong)
        raise wrong


class UnnamedMask(Handler):
    """The handler of a module without a mask, which refuses attention."""

    def sdpa(self, entry: Entry, args: SdpaArgs) -> NoReturn:
        raise AttentionError(
            "attention in a module for which no mask was named: name one for the rest, as in "
            "cp.attach(model, {'layers.*.attention': 'window'}, mask='full')"
        )

    def flex(self, entry: Entry, args: FlexArgs) -> NoReturn:
        self.sdpa(entry, SdpaArgs(*args[:3]))
