"""``enable(model, cp)`` makes a transformers model context parallel, without other changes to the model or its use.

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

The model is called with whole batches, the same on every rank, and computes this rank's tokens. This takes four
interventions, besides hooks for modules that count positions (positions.py):

    before forward    the batch becomes a session and shards (batches.py); with towers, before the decoder (towers.py)
    attention         layers call the implementation "attnspan" (attention.py)
    recurrence        mixers have a forward that calls functions over ranks (mixers.py)
    after forward     the loss over all ranks (losses.py), and an error if a layer did not run

[Note: a config of its own] The attention implementation is an entry of the config, which other models may share. So an
enabled model gets a copy of its config; other models with the same config do not change.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, NoReturn, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from attnspan.dtypes import lse_dtype
from attnspan.errors import ModelError, one_of
from attnspan.integrations.huggingface.adapters import adds_to_loss
from attnspan.integrations.huggingface.attention import register_sharded_attention
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
from attnspan.integrations.huggingface.biases import table_by_key
from attnspan.integrations.huggingface.binding import ModelBinding, own_config
from attnspan.integrations.huggingface.call_counts import CallCounts
from attnspan.integrations.huggingface.checking import check_call, check_output, tensors_of
from attnspan.integrations.huggingface.dealt_towers import deal_tower, whole_tower
from attnspan.integrations.huggingface.forward_pass import (
    ForwardPass,
    LayerKind,
    LayerRole,
    ModelPasses,
    WholeBatch,
    calls_so_far,
)
from attnspan.integrations.huggingface.inline_attention import bias_table, check_family_bias
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.integrations.huggingface.losses import Count, label_kind, loss_of
from attnspan.integrations.huggingface.masking import LayerMask, given_masks
from attnspan.integrations.huggingface.mixer_functions import ShardedTokens
from attnspan.integrations.huggingface.model_parts import ModelParts
from attnspan.integrations.huggingface.positions import (
    counted_positions,
    counts_by_itself,
    counts_by_mask,
    position_hooks,
)
from attnspan.integrations.huggingface.sessions import session_factories
from attnspan.integrations.huggingface.towers import (
    FEATURES,
    OUTPUTS,
    check_batch,
    check_given,
    check_runs_before,
    layer_masks_of,
    shard_features,
)
from attnspan.masks import Documents, Full
from attnspan.parallel import ContextParallel, checkpoint_regions
from attnspan.parallel.attentions import SessionAttention
from attnspan.parallel.checksum import Weights, check_same
from attnspan.parallel.eager import eagerly
from attnspan.parallel.soft_cap import soft_cap
from attnspan.plan.choose import KeepKeys
from attnspan.transports.group import Group

Output = ModelOutput | tuple[object, ...] | Tensor
"""What a model returned: a ModelOutput, a tuple, or a tensor."""

PER_TOKEN = ("logits", "last_hidden_state", "hidden_states")
"""Outputs with a row for each token."""

P = ParamSpec("P")
T = TypeVar("T")


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

    `cp` is a mesh, a process group or a virtual world, or a session, whose ranks, layout, strategy and kernel are used,
    and the documents and padding of its mask in addition to those of each batch (sessions.py). Every rank then calls
    the model with the same whole batch. It returns this rank's tokens, or all of them with ``outputs="whole"``, and the
    loss of all ranks. `over` is the group that gradients are averaged over, if larger than the session's. `keep_keys`
    is that of `ContextParallel`; None is the session's, or "auto" with a mesh. A `PeftModel` may be given instead of
    the model inside. Every rank runs the towers of images and sounds on the whole batch, or with ``towers="dealt"`` on
    its part of the images (dealt_towers.py).

    Returns a handle with the session, `unshard`, `assert_used` and `disable`. The model itself is changed: keep calling
    ``model(...)``.
    """
    return Enabled(model, cp, over, outputs, keep_keys, towers)


class Enabled:
    """An enabled model, with the `session` of its latest batch, its attention `layers` and recurrent `mixers`."""

    def __init__(
        self, called: nn.Module, cp: ContextParallel | Group, over: Group, outputs: str, keep_keys: KeepKeys | None,
        towers: str = "whole",
    ):  # fmt: skip
        parts = ModelParts.of(called)
        self.outputs = one_of("outputs", outputs, ["shards", "whole"], error=ModelError)
        """What the model returns: this rank's tokens, or all."""
        self._parts, self.model, self.over = parts, parts.model, over
        self.decoder, self.layers, self.mixers = parts.decoder, parts.layers, parts.mixers
        kinds = [self._kind_of(layer) for layer in self.layers]
        self.kinds = list(dict.fromkeys(kinds))
        """The kinds that layers are of, each once. Bindings and passes refer to them by index."""
        self._factories = session_factories(cp, kinds, self.mixers, keep_keys)
        self.transport = next(iter(self._factories.values())).transport
        self._deals = one_of("towers", towers, ["whole", "dealt"], error=ModelError) == "dealt"
        if self._deals and not parts.towers:
            raise ModelError(f"towers must be 'whole': {type(self.model).__name__} has none that could be dealt")
        self._read_forward()
        device = self.transport.device
        self._score_mod = functools.lru_cache(maxsize=16)(lambda bias, shape: bias.score_mod(shape, device))
        self._recognised: set[object] = set()  # biases that the model handed to layers, compared with its family's
        self._whole_batch: WholeBatch | None = None  # while the model runs, before its decoder
        self._compared = self.transport.ranks == 1  # whether weights were compared with other ranks', in the first pass
        self._passes = ModelPasses()
        self._counts = CallCounts(type(self.model).__name__, self.layers, self.mixers)
        self._binding = ModelBinding(self, parts, [self.kinds.index(kind) for kind in kinds])
        self.live = False
        self._install()

    def _read_forward(self) -> None:
        """Read the arguments of the model and its decoder, and the kind of its loss."""
        self._loss = label_kind(self.model)
        self._adds_to_loss = adds_to_loss(self._parts.called, self.model)
        self._parameters = inspect.signature(type(self.model).forward).parameters
        self._takes_kwargs = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in self._parameters.values())
        called = inspect.signature(type(self._parts.called).forward).parameters
        self._argument_names = [name for name in called if name != "self"]
        self._decoder_names = list(inspect.signature(type(self.decoder).forward).parameters)[1:]

    # ---- beginning and ending ------------------------------------------------------------------------------------

    def _install(self) -> None:
        """Bind the layers, and register all hooks."""
        by_bias = bool(self.layers) and all(layer.bias or layer.cross for layer in self.layers)
        takes = self._parameters if self.decoder is self.model else self._decoder_names
        hooks = position_hooks(self.decoder, takes, self.current_pass, self._parts.encoder, by_bias)
        register_sharded_attention()
        own_config(self.model)
        self._binding.bind()
        self._hooks = [
            self._parts.called.register_forward_pre_hook(self._on_call, with_kwargs=True),
            self._parts.called.register_forward_hook(self._on_return, with_kwargs=True),
            *(hook for each in hooks for hook in each.register()),
        ]
        if self.decoder is not self.model:
            self._hooks.append(self.decoder.register_forward_pre_hook(self._on_decoder, with_kwargs=True))
        for path, tower in self._parts.towers.items():
            self._hooks.append(tower.register_forward_pre_hook(functools.partial(self._on_tower, path)))
            if self._deals and self.transport.ranks > 1:
                deal_tower(path, tower, self.transport)
        vars(self.model)["generate"] = _no_generation
        self.live = True

    def disable(self) -> None:
        """Restore the model's own attention; backward may still follow. See forward_pass.py."""
        if not self.live:
            return
        for hook in self._hooks:
            hook.remove()
        self._binding.unbind()
        for tower in self._parts.towers.values() if self._deals else ():
            whole_tower(tower)
        vars(self.model).pop("generate", None)
        self.live = False
        self._passes.disable(self._binding.run_again)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        name = type(self.model).__name__
        raise ModelError(
            f"enable() returns a handle, which is not called: call the {name} itself, model(...), as before enable()"
        )

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
        return self._passes.latest().session

    def reset(self) -> None:
        """Start counting from 0."""
        self._counts.reset()

    def assert_used(self, passes: int = 1) -> None:
        """Raise unless every attention layer ran once in each of so many forward passes since the last reset.

        A pass in which a layer did not attend has already raised by itself.
        """
        self._counts.assert_used(passes)

    def unshard(self, output: Output) -> Output:
        """What the model returned, with all tokens of logits and hidden states, on every rank.

        Tensors derived from it, as by `detach`, DDP or FSDP2, are taken for the latest batch's.
        """
        if not isinstance(output, Tensor | ModelOutput):
            raise ModelError(
                f"output must be a tensor or what the model returned (return_dict=True), got {type(output).__name__}"
            )
        source = self._passes.of_output(each for _, each in tensors_of(output))
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
        current, given = _eager_in_compiled_model(Enabled._begin_pass)(self, args, kwargs)
        self._passes.begin(current)
        return (), given

    def _on_decoder(self, decoder: nn.Module, args: tuple[object, ...], kwargs: Entries) -> tuple[tuple[()], Entries]:
        """Before the decoder's forward, in a model with towers: merged embeddings become shards."""
        current, given = _eager_in_compiled_model(Enabled._begin_decoder)(self, args, kwargs)
        self._passes.begin(current)
        return (), given

    def _on_tower(self, path: str, tower: nn.Module, args: object) -> None:
        if self._passes.running is not None:
            check_runs_before(path, tower)

    def _on_return(self, model: nn.Module, args: object, kwargs: object, output: Output) -> Output:
        """After forward: every layer has attended; the loss."""
        current = self._passes.end()
        if current is None:
            raise ModelError(f"{type(self.model).__name__} did not call its decoder, {type(self.decoder).__name__}")
        return _eager_in_compiled_model(Enabled._end_pass)(self, current, output)

    def _begin_pass(self, args: tuple[object, ...], kwargs: Entries) -> tuple[ForwardPass | None, Entries]:
        """The pass of a call, and what the model is given; of one with towers, no pass yet, and the whole batch."""
        given: Entries = dict(zip(self._argument_names, args, strict=False)) | kwargs
        self._binding.check()
        check_call(self.model, given, self.decoder is not self.model)
        if self._adds_to_loss is not None and given.get("labels") is not None:
            raise ModelError(
                f"labels must not be given: {self._adds_to_loss} adds a term of its own to the loss, which is not "
                "served over ranks; compute the loss from logits, and add that term to it"
            )
        count = given.pop("num_items_in_batch", None)
        if self.model.config.is_encoder_decoder:
            given, by_role = self._encoder_decoder(given)
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
            given, by_role = shards.entries, {"only": shards}
        given["use_cache"] = False
        current = self._make_pass(by_role, {}, count, max_position)
        return current, {name: value for name, value in given.items() if self._is_taken(name)}

    def _begin_towers(self, given: Entries, whole: WholeBatch) -> Entries:
        """The arguments of a model with towers, which runs on the whole batch."""
        if not self._compared:
            check_batch(given, self.transport)
        self._check_weights()
        self._whole_batch = whole
        return {name: value for name, value in given.items() if name not in DOCUMENT_ENTRIES} | {"use_cache": False}

    def _begin_decoder(self, args: tuple[object, ...], kwargs: Entries) -> tuple[ForwardPass, Entries]:
        """The pass of a decoder's call, and the decoder's new arguments."""
        whole, self._whole_batch = self._whole_batch, None
        if whole is None:
            raise ModelError(
                f"{type(self.decoder).__name__} must be called once by the model that was enabled, "
                f"{type(self.model).__name__}; a decoder that runs by itself, or several times, is not served"
            )
        given: Entries = dict(zip(self._decoder_names, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if value is not None}
        mask = given.pop("attention_mask", None)
        layer_masks = layer_masks_of(mask, (kind.layer_mask for kind in self.kinds))
        check_given(given, mask, whole.sequence)
        features = {name: given.pop(name) for name in (*FEATURES, *FEATURES.values()) if name in given}
        sequence = replace(whole.sequence, entries=given)
        self._check_counting(sequence)
        shards = self._shards("only", sequence, whole.labels, layer_masks)
        entries = shards.entries | shard_features(features, shards.session) | {"use_cache": False}
        entries = {name: value for name, value in entries.items() if name in kwargs or name in self._decoder_names}
        if mask is not None and not isinstance(mask, Tensor):
            entries["attention_mask"] = given_masks(mask)
        return self._make_pass({"only": shards}, layer_masks, whole.count, sequence.max_position), entries

    def _check_restarts(self, given: Entries, sequence: SequenceInputs) -> None:
        """Refuse documents by position_ids in a model that takes none and counts the tokens of a row."""
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
        self,
        by_role: dict[LayerRole, Shards],
        layer_masks: Mapping[LayerMask, LayerMask],
        count: Count,
        max_position: int | Tensor,
    ) -> ForwardPass:
        own = by_role["only" if "only" in by_role else "decoder"]
        encoder = by_role["encoder"].session if "encoder" in by_role else None
        attentions = [self._bound_attention(kind, by_role) for kind in self.kinds]
        self._check_weights()
        regions = checkpoint_regions.regions()
        again = WeakSet(each.name for each in regions if each.recomputing and each.name is not None)
        before, tokens = calls_so_far(attentions), ShardedTokens(own.session, own.padding)
        masks = [layer_masks.get(kind.layer_mask, kind.layer_mask) for kind in self.kinds]
        return ForwardPass(
            own.session, encoder, attentions, masks, before, tokens, own.labels, count, max_position,
            own.document_positions,
            rerun_regions=again,
        )  # fmt: skip

    def _encoder_decoder(self, given: Entries) -> tuple[Entries, dict[LayerRole, Shards]]:
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
            self._counts.add(current)
        self._passes.returned(current, (each for _, each in tensors_of(output)))
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

    def _is_taken(self, name: str) -> bool:
        """Whether forward takes an argument; positions only by name, others as more arguments too."""
        return name in self._parameters or (self._takes_kwargs and not name.endswith("position_ids"))

    # ---- sessions ------------------------------------------------------------------------------------------------

    def _shards(
        self,
        role: LayerRole,
        sequence: SequenceInputs,
        labels: Tensor | None,
        layer_masks: Mapping[LayerMask, LayerMask] = MappingProxyType({}),
    ) -> Shards:
        factory = self._factories[role]
        session, positions = factory.session(sequence, layer_masks), sequence.document_positions(factory.documents)
        return shards_of(sequence, session, labels, positions)

    def _kind_of(self, layer: AttentionLayer) -> LayerKind:
        role: LayerRole = "only"
        if self.model.config.is_encoder_decoder:
            role = "cross" if layer.cross else "encoder" if layer.module in self._parts.encoder else "decoder"
        layer_mask = LayerMask(False, None) if role == "cross" else LayerMask.of(layer)
        return LayerKind(role, layer_mask, layer.scale, layer.softcap, layer.bias)

    def _bound_attention(self, kind: LayerKind, by_role: dict[LayerRole, Shards]) -> SessionAttention:
        """The attention of layers of a kind, in a batch with these shards."""
        if kind.role == "cross":
            keys, session = by_role["encoder"], by_role["decoder"].session
            mask = functools.reduce(operator.and_, keys.batch_masks) if keys.batch_masks else Full()
            return session.cross(keys.session, mask, scale=kind.scale)
        session, name = by_role[kind.role].session, self._factories[kind.role].name(kind.layer_mask)
        score_mod = None if kind.softcap is None else soft_cap(kind.softcap)
        if kind.bias is not None:
            positions = by_role[kind.role].document_positions
            score_mod = self._score_mod(
                kind.bias, kind.bias.shape(session.seq_len, 1 if positions is None else len(positions))
            )
        return session.attention_for(name, scale=kind.scale, score_mod=score_mod)

    # ---- what a layer asks for -----------------------------------------------------------------------------------

    def current_pass(self) -> ForwardPass:
        """The pass that a layer or mixer runs in. See [Note: the pass of a region] in forward_pass.py."""
        return self._passes.current()

    def bias_tables(
        self, current: ForwardPass, layer: AttentionLayer, given: Tensor | None, dtype: torch.dtype
    ) -> list[Tensor] | None:
        """The tables of a layer's bias in the `current` pass, for queries of a dtype; `given` is the bias that the
        model passed to the layer."""
        if layer.bias is None or given is None:
            return None
        wide = lse_dtype(dtype)
        if layer.bias.kind == "distance":
            return [given.to(wide)]
        key = layer.bias, given.dtype, wide
        if key not in current.tables:
            if key not in self._recognised:
                check_family_bias(layer.name, layer.module, layer.bias, given)
                self._recognised.add(key)
            table = bias_table(layer.module, layer.bias, current.session.seq_len, given.dtype).to(wide)
            by_slope = layer.bias.kind == "slope"
            current.tables[key] = table if by_slope else table_by_key(table, current.document_positions)
        return [current.tables[key]]


def _eager_in_compiled_model(function: Callable[P, T]) -> Callable[P, T]:
    """The function without compilation where the model is compiled; elsewhere a loss that is compiled stays so."""
    return eagerly(function) if torch.compiler.is_compiling() else function


def _no_generation(*args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        "generate() does not run on an enabled model, whose ranks hold parts of a sequence; disable() it first, then "
        "generate, or use attnspan.Engine(model, pages=...)"
    )
