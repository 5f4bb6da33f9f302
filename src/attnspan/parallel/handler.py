"""Handlers answer the calls that a scope intercepts: with a session's attention, or with an error.

A handler has one method for SDPA and one for flex_attention. Whether the call, and the scope around it, are compiled is
their argument `context` ([Note: call contexts] in checkpoint_checks.py). nn.MultiheadAttention is run by code that
calls SDPA (multihead.py).

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
from attnspan.parallel.call_args import FlexArgs, FlexResult, SdpaArgs, as_4d
from attnspan.parallel.checkpoint_checks import CallContext, CheckpointChecks, attention_by_context, checks_of
from attnspan.parallel.dtensors import is_dtensor
from attnspan.parallel.flex import flex_attention
from attnspan.parallel.multihead import multi_head_attention
from attnspan.parallel.run_attention import run_attention
from attnspan.parallel.sdpa_checks import SdpaChecks


class AttentionHandler(ABC):
    """Answers intercepted calls. Made in eager code, before compiled code uses it."""

    @abstractmethod
    def sdpa(self, context: CallContext, args: SdpaArgs) -> Tensor:
        """F.scaled_dot_product_attention."""

    @abstractmethod
    def flex(self, context: CallContext, args: FlexArgs) -> FlexResult:
        """flex_attention."""

    @cached_property
    def multi_head(self) -> Callable[..., object]:
        """F.multi_head_attention_forward, in eager code."""
        return multi_head_attention(lambda *args, **kwargs: self.sdpa("eager", SdpaArgs(*args, **kwargs)))


class SessionHandler(AttentionHandler):
    """A session's attention. SDPA uses the mask called `mask_name`; with None, it is refused."""

    def __init__(self, attentions: Attentions, mask_name: str | None, checks: CheckpointChecks | None = None):
        self.spec, self.attentions, self.mask_name = attentions.spec, attentions, mask_name
        self.checks = checks_of(self.spec) if checks is None else checks
        if mask_name is not None:
            attend = attentions.named[mask_name]
            self.by_context, self.sdpa_checks = (
                attention_by_context(attend, self.checks),
                SdpaChecks(self.spec, attend.plan),
            )
            self._scaled: dict[float, Attention] = {}

    def flex(self, context: CallContext, args: FlexArgs) -> FlexResult:
        if context == "eager":
            self.checks["eager"]()
        return flex_attention(self.attentions, args, self.mask_name, context)

    def sdpa(self, context: CallContext, args: SdpaArgs) -> Tensor:
        """SDPA under the mask of this handler."""
        if self.mask_name is None:
            names = " or ".join(f"mask={name!r}" for name in self.spec.masks)
            raise AttentionError(f"F.scaled_dot_product_attention has no mask inside this cp.flex(); give it {names}")
        attend = self._eager_attention(args) if context == "eager" else self._compiled_attention(context, args)
        return self._run(attend, args)

    def _compiled_attention(self, context: CallContext, args: SdpaArgs) -> Attention:
        """The attention for a call in compiled code, whose arguments are checked."""
        self.check_sdpa(args)
        if not self.sdpa_checks.has_usual_scale(args):
            raise AttentionError(
                f"scale must be the session's under torch.compile, got {args.scale}; make it with "
                "ContextParallel(..., scale=...)"
            )
        return self.by_context[context]

    def _eager_attention(self, args: SdpaArgs) -> Attention:
        """The attention for a call in eager code, whose tensors and arguments are checked."""
        for tensor in args[:3]:
            self.spec.sharding.check_mark(tensor)
        attend = self.by_context["eager"] if self.sdpa_checks.has_usual_scale(args) else self._with_scale(args)
        try:
            self.check_sdpa(args)
        except AttentionError as wrong:
            self.refuse_together(attend, args, wrong)
        self.checks["eager"]()
        return attend

    def _with_scale(self, args: SdpaArgs) -> Attention:
        assert args.scale is not None, "None is the usual one"
        if args.scale not in self._scaled:
            self._scaled[args.scale] = self.by_context["eager"].variant(scale=args.scale)
        return self._scaled[args.scale]

    def _run(self, attend: Attention, args: SdpaArgs) -> Tensor:
        query, key, value = args[:3]
        inputs = Inputs(as_4d(query), as_4d(key), as_4d(value), dropout_p=args.dropout_p)
        out, _ = run_attention(self.spec, attend, inputs)
        return out if query.dim() == 4 else out.reshape(*query.shape[:-1], value.shape[-1])

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


class UnnamedMask(AttentionHandler):
    """The handler of a module without a mask, which refuses attention."""

    def sdpa(self, context: CallContext, args: SdpaArgs) -> NoReturn:
        raise AttentionError(
            "attention in a module for which no mask was named: name one for the rest, as in "
            "cp.attach(model, {'layers.*.attention': 'window'}, mask='full')"
        )

    def flex(self, context: CallContext, args: FlexArgs) -> NoReturn:
        self.sdpa(context, SdpaArgs(*args[:3]))
