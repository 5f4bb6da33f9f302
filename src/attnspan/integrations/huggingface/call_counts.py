"""Counts how often attention ran in an enabled model: once per layer in every pass, else it is an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.forward_pass import ForwardPass, calls_so_far
from attnspan.integrations.huggingface.interface_calls import calls_of
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.integrations.huggingface.mixers import RecurrentMixer


class CallCounts:
    """Passes, and calls of attention in them, since the last reset."""

    def __init__(self, model: str, layers: Sequence[AttentionLayer], mixers: Iterable[RecurrentMixer]) -> None:
        self._model, self._layers = model, len(layers)
        self._functions = {(mixer.name, function) for mixer in mixers for function in mixer.functions}
        self._min_calls = sum(layer.times for layer in layers)
        self._max_calls = sum(layer.times * (len(calls_of(layer.module)) or 1) for layer in layers)  # wherever one can
        self.reset()

    def reset(self) -> None:
        """Start counting from 0."""
        self.passes = self._calls = 0

    def assert_used(self, passes: int = 1) -> None:
        """See `Enabled.assert_used`."""
        wanted = passes * self._min_calls
        if self.passes != passes or self._calls not in (wanted, passes * self._max_calls):
            raise ModelError(
                f"attention must have run in {self._layers} layers x {passes} passes = {wanted} times since the "
                f"last reset, it ran {self._calls} times in {self.passes} passes"
            )

    def add(self, current: ForwardPass) -> None:
        """Raise unless every layer attended once in this pass, and every mixer ran."""
        ran = sum((calls_so_far(current.attentions) - current.calls_before).values())
        self.passes, self._calls = self.passes + 1, self._calls + ran
        if ran not in (self._min_calls, self._max_calls) and ran > self._min_calls:
            raise ModelError(
                f"attention ran {ran} times in {self._layers} layers: layers that run several times in a pass are "
                "not served"
            )
        if ran < self._min_calls:
            raise ModelError(
                f"{ran} of {self._min_calls} attention layers of {self._model} asked for attention in "
                "this pass; the others were left out, or computed it in another way, on this rank's tokens alone"
            )
        left_out = sorted(self._functions - current.mixer_tokens.called)
        if left_out:
            mixer, function = left_out[0]
            raise ModelError(
                f"{mixer} did not call {function} in this pass, as when the model was enabled; it was left out, or "
                "computed in another way, on this rank's tokens alone"
            )
