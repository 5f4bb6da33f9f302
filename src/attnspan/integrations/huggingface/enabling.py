"""``enable(model, cp)``: a transformers model whose sequences are sharded over ranks, and nothing else changes.

>>> import copy, torch
>>> import attnspan as span
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_hidden_layers=2)
>>> llama, tokens = LlamaForCausalLM(LlamaConfig(**sizes)), torch.arange(13).view(1, 13)
>>> alone = llama(input_ids=tokens, labels=tokens).loss
>>> def rank(world):
...     model = copy.deepcopy(llama)
...     with enable(model, world):
...         out = model(input_ids=tokens, labels=tokens)
...     return tuple(out.logits.shape), abs(out.loss - alone).item() < 1e-5
>>> span.testing.loopback(ranks=2).run(rank)
[((1, 7, 64), True), ((1, 6, 64), True)]

The model is called with whole batches, the same on every rank, and computes this rank's tokens. Three places do it, and
positions.py adds hooks where a module counts positions itself:

    before forward    the batch becomes a session and shards (batches.py); with towers, before the decoder's (towers.py)
    attention         layers ask for the implementation "attnspan" (attention.py)
    recurrence        mixers have a forward whose functions are over ranks (mixers.py)
    after forward     the loss, over all ranks (losses.py); a layer that did not run is an error

[Note: a config of its own] The implementation is an entry of the config, which another model may share. So an enabled
model gets a copy; a model that was made from the same config is not touched.

[Note: the pass of a region] Layers find their session in the latest pass of their model. A checkpointed layer runs
again in backward, when there may have been another pass; it gets that of its first run (checkpoint_regions.py). If the
model was disabled by then, it is enabled while the region runs. If the whole call is checkpointed, it is repeated in
backward, with a pass of its own, which layers then find and which is not counted.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from threading import RLock
from types import MappingProxyType
from typing import Literal, NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from attnspan.dtypes import lse_dtype
from attnspan.errors import ModelError, one_of
from attnspan.integrations.huggingface.adapters import adapted, adds_to_loss, check_adapters
from attnspan.integrations.huggingface.attention import (
    BINDING,
    NAME,
    LayerBinding,
    MixerBinding,
    attend,
    check_configs,
    configs_of,
    is_bound,
    own_config,
    register,
    tune_temperature,
    wants_latents,
)
from attnspan.integrations.huggingface.batches import (
    DOCUMENT_ENTRIES,
    Entries,
    SequenceInputs,
    Shards,
    labels_of,
    sequence_of,
    shards_of,
    split_decoder,
)
from attnspan.integrations.huggingface.biases import ScoreBias, bind_bias, table_by_key, unbind_bias
from attnspan.integrations.huggingface.checking import (
    check_call,
    check_model,
    check_not_enabled,
    check_output,
    tensors_of,
)
from attnspan.integrations.huggingface.dealt_towers import deal_tower, whole_tower
from attnspan.integrations.huggingface.latents import METHOD, LatentSource, latent_source
from attnspan.integrations.huggingface.layers import (
    WITHOUT_CACHE,
    AttentionLayer,
    attention_layers,
    calls_of,
    split_idle,
)
from attnspan.integrations.huggingface.losses import Count, label_kind, loss_of
from attnspan.integrations.huggingface.masking import Pattern, given_masks
from attnspan.integrations.huggingface.mixers import recurrent_mixers
from attnspan.integrations.huggingface.own_attention import bias_table, bind_forward, check_family_bias, unbind_forward
from attnspan.integrations.huggingface.positions import (
    counted_positions,
    counts_by_itself,
    counts_by_mask,
    position_hooks,
)
from attnspan.integrations.huggingface.sequence_functions import MixedTokens
from attnspan.integrations.huggingface.sessions import SessionFactory, unseen_by_mixers
from attnspan.integrations.huggingface.towers import (
    FEATURES,
    OUTPUTS,
    check_batch,
    check_given,
    check_runs_before,
    decoder_of,
    modules_outside,
    patterns_of,
    shard_features,
    towers_of,
)
from attnspan.masks import Documents, Full
from attnspan.parallel import ContextParallel, checkpoint_regions
from attnspan.parallel.attentions import BoundAttention
from attnspan.parallel.checksum import Weights, check_same
from attnspan.parallel.eager import eagerly
from attnspan.parallel.soft_cap import soft_cap
from attnspan.plan.choose import KeepKeys
from attnspan.transports.group import Group

Side = Literal["only", "encoder", "decoder", "cross"]

Output = ModelOutput | tuple[object, ...] | Tensor
"""What a model returned: a ModelOutput, a tuple, or a tensor."""

PER_TOKEN = ("logits", "last_hidden_state", "hidden_states")
"""Outputs with a row for each token."""

P = ParamSpec("P")
T = TypeVar("T")


class LayerKind(NamedTuple):
    """Layers of one kind share an attention. `side` is the sequence that they are of."""

    side: Side
    pattern: Pattern
    scale: float
    softcap: float | None
    bias: ScoreBias | None


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass: the sessions of its batch, an attention for every kind of layer, and labels for the loss."""

    session: ContextParallel  # of what is returned: the only sequence, or the decoder's
    encoder: ContextParallel | None
    attentions: list[BoundAttention]
    patterns: Mapping[Pattern, Pattern]  # of layers whose masks depend on the batch
    calls_before: Counter[int]  # how often each session had attended
    mixed: MixedTokens  # for recurrent mixers
    labels: Tensor | None = None
    count: Count = None
    max_position: int | Tensor = 0
    document_positions: Tensor | None = None  # of the tokens of a whole row, if not 0, 1, 2, ...
    tables: dict[object, Tensor] = field(default_factory=dict)  # of biases by key
    rerun_regions: WeakSet[object] = field(default_factory=WeakSet)  # checkpointed regions that run again, around it


def enable(
    model: nn.Module,
    cp: ContextParallel | Group = None,
    *,
    over: Group = None,
    outputs: Literal["shards", "whole"] = "shards",
    keep_keys: KeepKeys | None = None,
    towers: Literal["whole", "dealt"] = "whole",
) -> Enabled:
    """Make a transformers model context parallel over the ranks of `cp`, until `disable()` or the end of a `with`.

    `cp` is a mesh, a process group or a virtual world, or a session: its ranks, layout, strategy and kernel are used,
    and the documents and padding of its mask, beside those of each batch (sessions.py). Every rank then calls the
    model with the same whole batch. What comes back is this rank's tokens, or with ``outputs="whole"`` all of them,
    and the loss of all. `over` is the group that gradients are averaged over, if larger than the session's.
    `keep_keys` is that of `ContextParallel`; None is the session's, or with a mesh "auto".
    A `PeftModel` may be given in place of the model inside. Every rank runs the towers of images and sounds on the
    whole batch; with ``towers="dealt"`` each runs them on its part of the images (dealt_towers.py).
    """
    return Enabled(model, cp, over, outputs, keep_keys, towers)


@dataclass(frozen=True)
class WholeBatch:
    """What is known of a batch while its model runs on all of it, until the decoder is called."""

    sequence: SequenceInputs
    labels: Tensor | None
    count: Count


class Enabled:
    """An enabled model. `session` is that of its latest batch, `layers` are its attention layers, `mixers` others."""

    def __init__(
        self, called: nn.Module, cp: ContextParallel | Group, over: Group, outputs: str, keep_keys: KeepKeys | None,
        towers: str = "whole",
    ):  # fmt: skip
        model = adapted(called)
        check_adapters(called)
        check_not_enabled(model)
        self.decoder = decoder_of(model)
        """The module whose tokens are sharded: the model, or of one with towers its decoder."""
        outside = modules_outside(model, self.decoder)
        self.mixers = tuple(recurrent_mixers(model, outside))
        mixing = {mixer.module for mixer in self.mixers}
        layers, idle = split_idle(model, attention_layers(model, mixing, outside, WITHOUT_CACHE))
        self.layers, self._idle = tuple(layers), tuple(idle)
        check_model(model, self.decoder, self._idle, mixing)
        self.outputs = one_of("outputs", outputs, ["shards", "whole"], error=ModelError)
        """What the model returns: this rank's tokens, or all."""
        self.model, self.over = model, over
        self._called = called  # the model, or the `PeftModel` around it
        self._encoder_modules = _encoder_modules(model)
        kinds = [self._kind(layer) for layer in self.layers]
        self.kinds = list(dict.fromkeys(kinds))
        sides: list[Side] = list(dict.fromkeys(kind.side for kind in kinds if kind.side != "cross")) or ["only"]
        self._functions = {(mixer.name, function) for mixer in self.mixers for function in mixer.functions}
        if len(sides) > 1 and isinstance(cp, ContextParallel) and cp.masks != {"": Full()}:
            raise ModelError(
                "cp must be a mesh or a group for an encoder-decoder, whose sequences have masks of their own"
            )
        unseen = unseen_by_mixers(cp.mask) if self.mixers and isinstance(cp, ContextParallel) else None
        if unseen is not None:
            raise ModelError(
                f"cp's mask has {unseen!r} in it, which recurrent mixers ({self.mixers[0].name}) do not see; give "
                "attention_mask with every batch"
            )
        if keep_keys not in (None, True, False, "auto"):
            raise ModelError(f"keep_keys must be True, False or 'auto', got {keep_keys!r}")
        self._factories: dict[Side, SessionFactory] = {
            side: SessionFactory(cp, Counter(kind.pattern for kind in kinds if kind.side == side), keep_keys)
            for side in sides
        }
        self.transport = next(iter(self._factories.values())).transport
        self._loss = label_kind(model)
        self._adds_to_loss = adds_to_loss(called, model)
        self._parameters = inspect.signature(type(model).forward).parameters
        self._takes_kwargs = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in self._parameters.values())
        self._argument_names = [name for name in inspect.signature(type(called).forward).parameters if name != "self"]
        self._pass_of_region: WeakKeyDictionary[object, ForwardPass] = WeakKeyDictionary()  # in which it first ran
        device = self.transport.device
        self._score_mod = functools.lru_cache(maxsize=16)(lambda bias, shape: bias.score_mod(shape, device))
        self._recognised: set[object] = set()  # numbers that the model hands to layers, once compared with its family's
        self._pass_of_output: MutableMapping[Tensor, ForwardPass] = WeakTensorKeyDictionary()
        self._towers = towers_of(model, self.decoder)
        self._deals = one_of("towers", towers, ["whole", "dealt"], error=ModelError) == "dealt"
        if self._deals and not self._towers:
            raise ModelError(f"towers must be 'whole': {type(model).__name__} has none that could be dealt")
        self._decoder_names = list(inspect.signature(type(self.decoder).forward).parameters)[1:]
        self._whole_batch: WholeBatch | None = None  # while the model runs, before its decoder
        self._running: ForwardPass | None = None
        self._latest_pass: ForwardPass | None = None
        self._min_calls = sum(layer.times for layer in self.layers)
        asked = (layer.times * (len(calls_of(layer.module)) or 1) for layer in self.layers)
        self._max_calls = sum(asked)  # if each asks wherever it can
        self.passes, self._attention_calls = 0, 0
        self._compared = self.transport.ranks == 1  # with other ranks' weights: when they are first used
        self.live, self._lock = False, RLock()
        self._begin()

    # ---- beginning and ending ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        by_bias = bool(self.layers) and all(layer.bias or layer.cross for layer in self.layers)
        takes = self._parameters if self.decoder is self.model else self._decoder_names
        hooks = position_hooks(self.decoder, takes, self._current_pass, self._encoder_modules, by_bias)
        register()
        own_config(self.model)
        self._bind()
        self._hooks = [
            self._called.register_forward_pre_hook(self._on_call, with_kwargs=True),
            self._called.register_forward_hook(self._on_return, with_kwargs=True),
            *(hook for each in hooks for hook in each.register()),
        ]
        if self.decoder is not self.model:
            self._hooks.append(self.decoder.register_forward_pre_hook(self._on_decoder, with_kwargs=True))
        for path, tower in self._towers.items():
            self._hooks.append(tower.register_forward_pre_hook(functools.partial(self._on_tower, path)))
            if self._deals and self.transport.ranks > 1:
                deal_tower(path, tower, self.transport)
        vars(self.model)["generate"] = _no_generation
        self.live = True

    def _bind(self) -> None:
        self._own_names = [(config, config._attn_implementation) for config in configs_of(self.decoder)]
        for config, _ in self._own_names:
            config._attn_implementation = NAME
        for layer in self.layers:
            setattr(layer.module, BINDING, LayerBinding(layer, self.kinds.index(self._kind(layer)), self))
            source = latent_source(layer.module, wants_latents)
            if source is not None:
                source.bind()
            bind_bias(layer.module, layer.bias, layer.cross)
            bind_forward(layer.module, attend)
            tune_temperature(layer, by_itself=False)
        for layer in self._idle:
            setattr(layer.module, BINDING, LayerBinding(layer, None, self))
        for mixer in self.mixers:
            setattr(mixer.module, BINDING, MixerBinding(mixer, self))
            mixer.bind(self.mixed_tokens)

    def _unbind(self) -> None:
        for layer in self._idle:
            delattr(layer.module, BINDING)
        for layer in self.layers:
            delattr(layer.module, BINDING)
            if isinstance(source := vars(layer.module).get(METHOD), LatentSource):
                source.unbind()
            unbind_bias(layer.module, layer.cross)
            unbind_forward(layer.module)
            tune_temperature(layer, by_itself=True)
        for mixer in self.mixers:
            delattr(mixer.module, BINDING)
            mixer.unbind()
        for config, name in self._own_names:
            config._attn_implementation = name

    def disable(self) -> None:
        """Give the model its own attention back; backward may come later. See [Note: the pass of a region]."""
        if not self.live:
            return
        for hook in self._hooks:
            hook.remove()
        self._unbind()
        for tower in self._towers.values() if self._deals else ():
            whole_tower(tower)
        vars(self.model).pop("generate", None)
        self.live, self._latest_pass = False, None
        for region in list(self._pass_of_region):
            checkpoint_regions.rerun_through(region, self._run_again)

    def _run_again(self, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A region that first ran enabled does so again."""
        with self._lock:
            if is_bound(self.model):
                raise ModelError(
                    "a checkpointed region runs backward after disable(), and the model is enabled again; run it before"
                )
            self._bind()
            try:
                return run(*args, **kwargs)
            finally:
                self._unbind()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *raised: object) -> None:
        self.disable()

    def __deepcopy__(self, memo: object) -> Enabled:
        return self

    def __reduce__(self) -> NoReturn:
        raise ModelError(
            "an enabled model cannot be saved whole: use save_pretrained or state_dict(), or disable it first"
        )

    # ---- what it is ----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        found = f"attention layers: {len(self.layers)}, recurrent mixers: {len(self.mixers)}"
        return (
            f"Enabled({type(self.model).__name__} over {self.ranks} ranks; {found}{'' if self.live else '; disabled'})"
        )

    @property
    def ranks(self) -> int:
        """How many ranks a sequence is spread over."""
        return self.transport.ranks

    @property
    def session(self) -> ContextParallel:
        """The session of the latest batch; of an encoder-decoder, the decoder's."""
        return self._latest().session

    def _latest(self) -> ForwardPass:
        if self._latest_pass is None:
            raise ModelError("there is no batch: call the model first")
        return self._latest_pass

    def reset(self) -> None:
        """Start counting from 0."""
        self.passes = self._attention_calls = 0

    def assert_used(self, passes: int = 1) -> None:
        """Raise unless every attention layer ran once in each of so many forward passes since the last reset.

        A pass in which a layer did not attend has already raised by itself.
        """
        wanted = passes * self._min_calls
        if self.passes != passes or self._attention_calls not in (wanted, passes * self._max_calls):
            raise ModelError(
                f"attention must have run in {len(self.layers)} layers x {passes} passes = {wanted} times since the "
                f"last reset, it ran {self._attention_calls} times in {self.passes} passes"
            )

    def unshard(self, output: Output) -> Output:
        """What the model returned, with all tokens of logits and hidden states, on every rank.

        Tensors derived from it, as by `detach`, DDP or FSDP2, are taken for the latest batch's.
        """
        if not isinstance(output, Tensor | ModelOutput):
            raise ModelError(
                f"output must be a tensor or what the model returned (return_dict=True), got {type(output).__name__}"
            )
        known = self._pass_of_output
        source = next((known[each] for _, each in tensors_of(output) if each in known), self._latest())
        if isinstance(output, Tensor):
            return source.session.unshard(output, dim=1)
        return type(output)(**{name: self._unsharded(source, name, value) for name, value in output.items()})

    def _unsharded(self, source: ForwardPass, name: str, value: T) -> T:
        session = source.encoder if name.startswith("encoder_") and source.encoder is not None else source.session
        if name.removeprefix("encoder_").removeprefix("decoder_") not in PER_TOKEN:
            return value
        return session.unshard(value, dim=1)

    # ---- a forward pass ------------------------------------------------------------------------------------------

    def _on_call(self, model: nn.Module, args: tuple[object, ...], kwargs: Entries) -> tuple[tuple[()], Entries]:
        """Before forward: a batch becomes shards."""
        if not self.live:
            raise ModelError(
                "this is a copy of an enabled model that was disabled since; load its state_dict() into a model that "
                "was not enabled"
            )
        begin = eagerly(Enabled._begin_pass) if torch.compiler.is_compiling() else Enabled._begin_pass
        current, given = begin(self, args, kwargs)
        self._set_current(current)
        return (), given

    def _on_decoder(self, decoder: nn.Module, args: tuple[object, ...], kwargs: Entries) -> tuple[tuple[()], Entries]:
        """Before the decoder's forward, in a model with towers: merged embeddings become shards."""
        begin = eagerly(Enabled._begin_decoder) if torch.compiler.is_compiling() else Enabled._begin_decoder
        current, given = begin(self, args, kwargs)
        self._set_current(current)
        return (), given

    def _on_tower(self, path: str, tower: nn.Module, args: object) -> None:
        if self._running is not None:
            check_runs_before(path, tower)

    def _set_current(self, current: ForwardPass | None) -> None:
        self._running = current
        if current is not None and not current.rerun_regions:
            self._latest_pass = current

    def _on_return(self, model: nn.Module, args: object, kwargs: object, output: Output) -> Output:
        """After forward: every layer has attended; the loss."""
        current, self._running = self._running, None  # a layer that runs from here on does so by itself, or in backward
        # Where nothing is being compiled, a loss that was compiled by itself stays so.
        end = eagerly(Enabled._end_pass) if torch.compiler.is_compiling() else Enabled._end_pass
        if current is None:
            raise ModelError(f"{type(self.model).__name__} did not call its decoder, {type(self.decoder).__name__}")
        return end(self, current, output)

    def _begin_pass(self, args: tuple[object, ...], kwargs: Entries) -> tuple[ForwardPass | None, Entries]:
        """The pass of a call, and what the model is given; of one with towers, no pass yet, and the whole batch."""
        given: Entries = dict(zip(self._argument_names, args, strict=False)) | kwargs
        check_configs(config for config, _ in self._own_names)
        check_call(self.model, given, self.decoder is not self.model)
        if self._adds_to_loss is not None and given.get("labels") is not None:
            raise ModelError(
                f"labels must not be given: {self._adds_to_loss} adds a term of its own to the loss, which is not "
                "served over ranks; compute the loss from logits, and add that term to it"
            )
        count = given.pop("num_items_in_batch", None)
        if self.model.config.is_encoder_decoder:
            given, sides = self._encoder_decoder(given)
            max_position: int | Tensor = 0  # rotary embeddings by length are refused there
        else:
            labels = labels_of(given, self._loss, type(self.model).__name__)
            sequence = sequence_of(given)
            if self.decoder is not self.model:
                return None, self._begin_towers(given, WholeBatch(sequence, labels, count))
            by_content = counted_positions(self.model, given) if given.get("position_ids") is None else None
            if by_content is not None:
                sequence.entries["position_ids"] = by_content
            self._check_counting(sequence)
            self._check_restarts(given, sequence)
            shards, max_position = self._shards("only", sequence, labels), sequence.max_position
            given, sides = shards.entries, {"only": shards}
        given["use_cache"] = False
        current = self._make_pass(sides, {}, count, max_position)
        return current, {name: value for name, value in given.items() if self._is_taken(name)}

    def _begin_towers(self, given: Entries, whole: WholeBatch) -> Entries:
        """Before a model with towers runs on a whole batch: what it is given."""
        if not self._compared:
            check_batch(given, self.transport)
        self._check_weights()
        self._whole_batch = whole
        return {name: value for name, value in given.items() if name not in DOCUMENT_ENTRIES} | {"use_cache": False}

    def _begin_decoder(self, args: tuple[object, ...], kwargs: Entries) -> tuple[ForwardPass, Entries]:
        """The pass of a decoder's call, and what it is given of what it was called with."""
        whole, self._whole_batch = self._whole_batch, None
        if whole is None:
            raise ModelError(
                f"{type(self.decoder).__name__} must be called once by the model that was enabled, "
                f"{type(self.model).__name__}; a decoder that runs by itself, or several times, is not served"
            )
        given: Entries = dict(zip(self._decoder_names, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if value is not None}
        mask = given.pop("attention_mask", None)
        patterns = patterns_of(mask, (kind.pattern for kind in self.kinds))
        check_given(given, mask, whole.sequence)
        features = {name: given.pop(name) for name in (*FEATURES, *FEATURES.values()) if name in given}
        sequence = replace(whole.sequence, entries=given)
        self._check_counting(sequence)
        shards = self._shards("only", sequence, whole.labels, patterns)
        entries = shards.entries | shard_features(features, shards.session) | {"use_cache": False}
        entries = {name: value for name, value in entries.items() if name in kwargs or name in self._decoder_names}
        if mask is not None and not isinstance(mask, Tensor):
            entries["attention_mask"] = given_masks(mask)
        return self._make_pass({"only": shards}, patterns, whole.count, sequence.max_position), entries

    def _check_restarts(self, given: Entries, sequence: SequenceInputs) -> None:
        """Refuse positions that start again, in a model that is not given any and counts the tokens of a row."""
        restarts = given.get("position_ids") is not None and any(isinstance(x, Documents) for x in sequence.batch_masks)
        if restarts and "position_ids" not in self._parameters and any(map(counts_by_itself, self.decoder.modules())):
            raise ModelError(
                f"position_ids start again inside a row, and {type(self.model).__name__} takes none: it counts the "
                "tokens of a row; give each document a row of its own"
            )

    def _check_counting(self, sequence: SequenceInputs) -> None:
        """Refuse padding on the left where an embedding of positions would count a rank's ones."""
        counted = sequence.starts is not None and any(map(counts_by_mask, self.decoder.modules()))
        if counted and sequence.entries.get("position_ids") is None:
            raise ModelError(
                f"position_ids must be given with padding on the left: {type(self.model).__name__} counts them by "
                "attention_mask"
            )

    def _check_weights(self) -> None:
        if not self._compared:
            check_same({"weights or buffers": Weights(self.model).content().whole}, self.transport)  # replicated ones
            self._compared = True

    def _make_pass(
        self, sides: dict[Side, Shards], patterns: Mapping[Pattern, Pattern], count: Count, max_position: int | Tensor
    ) -> ForwardPass:
        own = sides["only" if "only" in sides else "decoder"]
        encoder = sides["encoder"].session if "encoder" in sides else None
        attentions = [self._attention(kind, sides) for kind in self.kinds]
        self._check_weights()
        again = WeakSet(
            region.name for region in checkpoint_regions.regions() if region.again and region.name is not None
        )
        before, mixed = _calls_so_far(attentions), MixedTokens(own.session, own.padding)
        return ForwardPass(
            own.session, encoder, attentions, patterns, before, mixed, own.labels, count, max_position,
            own.document_positions,
            rerun_regions=again,
        )  # fmt: skip

    def _encoder_decoder(self, given: Entries) -> tuple[Entries, dict[Side, Shards]]:
        """The encoder's and the decoder's sequence of a batch: the entries of both, and the shards of each."""
        whole = given.get("labels")
        if given.get("decoder_input_ids") is None and given.get("decoder_inputs_embeds") is None:
            moved = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
            if whole is None or moved is None:
                raise ModelError("decoder_input_ids must be given, or labels to make them from")
            given["decoder_input_ids"] = moved(labels=whole)
        labels = labels_of(given, self._loss, type(self.model).__name__)
        encoder_inputs, decoder_inputs = (sequence_of(part) for part in split_decoder(given))
        if encoder_inputs.padding is not None and not bool(encoder_inputs.padding.any(1).all()):
            raise ModelError("attention_mask has a row without tokens, to which a decoder cannot attend; leave it out")
        if any(isinstance(mask, Documents) for mask in (*encoder_inputs.batch_masks, *decoder_inputs.batch_masks)):
            raise ModelError(
                "documents in the sequences of an encoder-decoder are not served: give each a row of its own"
            )
        encoder = self._shards("encoder", encoder_inputs, None)
        decoder = self._shards("decoder", decoder_inputs, labels)
        entries = encoder.entries | {f"decoder_{name}": value for name, value in decoder.entries.items()}
        return entries, {"encoder": encoder, "decoder": decoder}

    def _end_pass(self, current: ForwardPass, output: Output) -> Output:
        if not current.rerun_regions:  # a repeated call was counted when it first ran
            self._count(current)
        for _, each in tensors_of(output):
            self._pass_of_output[each] = current
        check_output(
            output,
            () if self.decoder is self.model else OUTPUTS,
            {each.sharding.tokens for each in (current.session, current.encoder) if each is not None},
        )
        if current.labels is not None:
            logits = output["logits"] if isinstance(output, ModelOutput) else output[0]
            assert isinstance(logits, Tensor), "what has labels has logits"
            loss = loss_of(logits, current.labels, current.session, current.count, self.over)
            output = type(output)(loss=loss, **output) if isinstance(output, ModelOutput) else (loss, *output)
        return self.unshard(output) if self.outputs == "whole" else output

    def _count(self, current: ForwardPass) -> None:
        """Every layer has attended, once, and every mixer has run."""
        ran = sum((_calls_so_far(current.attentions) - current.calls_before).values())
        self.passes, self._attention_calls = self.passes + 1, self._attention_calls + ran
        if ran not in (self._min_calls, self._max_calls) and ran > self._min_calls:
            raise ModelError(
                f"attention ran {ran} times in {len(self.layers)} layers: layers that run several times in a pass are "
                "not served"
            )
        if ran < self._min_calls:
            raise ModelError(
                f"{ran} of {self._min_calls} attention layers of {type(self.model).__name__} asked for attention in "
                "this pass; the others were left out, or computed it in another way, on this rank's tokens alone"
            )
        left_out = sorted(self._functions - current.mixed.called)
        if left_out:
            mixer, function = left_out[0]
            raise ModelError(
                f"{mixer} did not call {function} in this pass, as when the model was enabled; it was left out, or "
                "computed in another way, on this rank's tokens alone"
            )

    def _is_taken(self, name: str) -> bool:
        """Whether forward takes an argument; positions only by name, others as more arguments too."""
        return name in self._parameters or (self._takes_kwargs and not name.endswith("position_ids"))

    # ---- sessions ------------------------------------------------------------------------------------------------

    def _shards(
        self,
        side: Side,
        sequence: SequenceInputs,
        labels: Tensor | None,
        patterns: Mapping[Pattern, Pattern] = MappingProxyType({}),
    ) -> Shards:
        factory = self._factories[side]
        session, positions = factory.session(sequence, patterns), sequence.document_positions(factory.documents)
        return shards_of(sequence, session, labels, positions)

    def _kind(self, layer: AttentionLayer) -> LayerKind:
        side: Side = "only"
        if self.model.config.is_encoder_decoder:
            side = "cross" if layer.cross else "encoder" if layer.module in self._encoder_modules else "decoder"
        pattern = Pattern(False, None) if side == "cross" else Pattern.of(layer)
        return LayerKind(side, pattern, layer.scale, layer.softcap, layer.bias)

    def _attention(self, kind: LayerKind, sides: dict[Side, Shards]) -> BoundAttention:
        """The attention of a kind of layer in a batch: called with shards."""
        if kind.side == "cross":
            keys, session = sides["encoder"], sides["decoder"].session
            mask = functools.reduce(operator.and_, keys.batch_masks) if keys.batch_masks else Full()
            return session.cross(keys.session, mask, scale=kind.scale)
        session, name = sides[kind.side].session, self._factories[kind.side].name(kind.pattern)
        score_mod = None if kind.softcap is None else soft_cap(kind.softcap)
        if kind.bias is not None:
            places = sides[kind.side].document_positions
            score_mod = self._score_mod(
                kind.bias, kind.bias.shape(session.seq_len, 1 if places is None else len(places))
            )
        return session.attention_for(name, scale=kind.scale, score_mod=score_mod)

    # ---- what a layer asks ---------------------------------------------------------------------------------------

    def mixed_tokens(self) -> MixedTokens:
        """What a recurrent mixer knows of the pass that it runs in."""
        return self._current_pass().mixed

    def pattern_for(self, kind: int) -> Pattern:
        """The mask of a kind of layer, in the pass that it runs in."""
        patterns, own = self._current_pass().patterns, self.kinds[kind].pattern
        return patterns.get(own, own) if patterns else own

    def attention_for(self, kind: int) -> BoundAttention:
        """The attention of a kind of layer, in the pass that it runs in. See [Note: the pass of a region]."""
        return self._current_pass().attentions[kind]

    def bias_tables(self, layer: AttentionLayer, given: Tensor | None, dtype: torch.dtype) -> list[Tensor] | None:
        """What the bias of a layer looks up, for queries of a dtype; `given` is what the model hands to the layer."""
        if layer.bias is None or given is None:
            return None
        wide = lse_dtype(dtype)
        if layer.bias.kind == "distance":
            return [given.to(wide)]
        current = self._current_pass()
        key = layer.bias, given.dtype, wide
        if key not in current.tables:
            if key not in self._recognised:
                check_family_bias(layer.name, layer.module, layer.bias, given)
                self._recognised.add(key)
            table = bias_table(layer.module, layer.bias, current.session.seq_len, given.dtype).to(wide)
            by_slope = layer.bias.kind == "slope"
            current.tables[key] = table if by_slope else table_by_key(table, current.document_positions)
        return [current.tables[key]]

    def query_positions(self) -> Tensor:
        """The global positions of the queries, (S,) or (B, S), in the pass that a layer runs in."""
        current = self._current_pass()
        assert current.encoder is None, "no encoder-decoder counts positions in its layers"
        return current.session.positions

    def _current_pass(self) -> ForwardPass:
        found = self._running
        if torch.compiler.is_compiling():
            return found  # type: ignore[return-value]
        for region in reversed(checkpoint_regions.regions()):
            if region.name is None:
                continue
            if found is not None and region.name in found.rerun_regions:
                continue
            if region.again and region.name in self._pass_of_region:
                found = self._pass_of_region[region.name]
            elif found is not None and not region.again:
                self._pass_of_region[region.name] = found
        if found is None:
            raise ModelError("a layer of an enabled model runs by itself; call the model that was enabled, model(...)")
        return found


def _calls_so_far(attentions: Iterable[BoundAttention]) -> Counter[int]:
    """How often attention ran, by what counts it."""
    calls = [each.attention.call.uses for each in attentions]
    return Counter({id(uses): uses.forward.total() for uses in calls})


def _encoder_modules(model: PreTrainedModel) -> set[nn.Module]:
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    return set() if encoder is None or encoder is model else set(encoder.modules())


def _no_generation(*args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        "generate() does not run on an enabled model, whose ranks hold parts of a sequence; disable() it first, then "
        "generate, or use attnspan.Engine(model, pages=...)"
    )
