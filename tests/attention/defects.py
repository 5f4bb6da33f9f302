"""Planted defects: bugs as people write them, each a function that plants one, named by what is wrong.

    with planted(the_merge_forgets_to_rescale):
        ...  # every attention is computed with the bug

A defect is given `plant(owner, name, bend)`, which puts ``bend(real)`` in the place of ``owner.name``; when the block
is left, everything is as it was. Code that has moved or was renamed cannot be planted in, and that is an error.

They lie in the order in which a key travels: plan, wire, kernel, merge, gradients of keys, heads, sinks and lse; and
what FlexAttention's programs add to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from attnspan.attention import lane, loop, ops
from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.lane import Lane
from attnspan.attention.sums import DeferredSum
from attnspan.attention.ulysses import HeadAllToAll
from attnspan.attention.wire import ReturningGradients, StagedMessage
from attnspan.kernels import AUTO, Accumulator, Dropout, MergedOutputs, PerTile, Spec, accumulator, blocks
from attnspan.masks import Causal, Mask, mask
from attnspan.masks.columns import Columns
from attnspan.masks.program import Program
from attnspan.masks.tile import Tile
from attnspan.plan import geometry, plan
from attnspan.plan.geometry import Geometry
from attnspan.plan.step import Step
from attnspan.testing import World
from attnspan.transports import Pending

Plant = Callable[[object, str, Callable], None]
Defect = Callable[[Plant], None]

DEFECTS: list[Defect] = []
_CACHES = (plan._steps, plan._geometry, plan._shifts, mask._cached_columns)


@contextmanager
def planted(defect: Defect) -> Iterator[None]:
    """Inside, the defect is there. Plans are worked out anew inside and after."""
    with pytest.MonkeyPatch.context() as patch:
        defect(lambda owner, name, bend: patch.setattr(owner, name, bend(getattr(owner, name))))
        for cache in _CACHES:
            cache.cache_clear()
        yield
    for cache in _CACHES:
        cache.cache_clear()


def defect(fn: Defect) -> Defect:
    DEFECTS.append(fn)
    return fn


def sentence(fn: Defect) -> str:
    """
    >>> sentence(the_merge_forgets_to_rescale)
    'the merge forgets to rescale'
    """
    return fn.__name__.replace("_", " ")


def bend_kernels(plant: Plant, forward: Callable | None = None, backward: Callable | None = None) -> None:
    """Whichever kernel is chosen, `forward(kernel, spec, q, k, v, tile)` stands in for its own, likewise backward."""

    def of(real):
        def chosen(self, *request):
            kernel = real(self, *request)
            return SimpleNamespace(
                forward=partial(forward, kernel) if forward else kernel.forward,
                backward=partial(backward, kernel) if backward else kernel.backward,
            )

        return chosen

    plant(PerTile, "kernel_for", of)
    plant(type(AUTO), "kernel_for", of)


def unmasked(tile: Tile) -> Tile:
    return tile._replace(lo=-len(tile.rows), hi=len(tile.cols))


# ---- the plan ------------------------------------------------------------------------------------------------------


@defect
def one_tile_of_a_step_is_dropped(plant):
    plant(Geometry, "tiles", lambda real: lambda self, rank, arena: real(self, rank, arena)[1:])


@defect
def one_tile_of_a_step_is_computed_twice(plant):
    def bend(real):
        def tiles(self, rank, arena):
            found = real(self, rank, arena)
            return (*found, *found[:1])

        return tiles

    plant(Geometry, "tiles", bend)


@defect
def one_band_of_the_mask_is_dropped(plant):
    plant(plan, "Geometry", lambda real: lambda bands, *rest: real(Columns(*(each[:-1] for each in bands)), *rest))


@defect
def documents_see_the_documents_before_them(plant):
    def bend(real):
        return lambda bands, *rest: real(Causal().band_columns(int(bands.q1.max()))[0], *rest)

    plant(plan, "Geometry", bend)


@defect
def the_mask_of_the_first_batch_row_is_used_for_all(plant):
    plant(Mask, "cover", lambda real: lambda self, q_len, kv_len=None, row=0: real(self, q_len, kv_len, 0))


@defect
def the_steps_of_the_first_batch_row_are_used_for_all(plant):
    plant(Lane, "__init__", lambda real: lambda self, call, row, *rest: real(self, call, 0, *rest))


@defect
def every_shard_is_taken_to_begin_at_position_zero(plant):
    def tiles(self, rank, arena):
        rows, cols = (sum(len(run.positions) for run in runs) for runs in (self.q_shards[rank], arena))
        return (Tile(range(rows), range(cols), 1 - rows, 0),) if rows and cols else ()

    plant(Geometry, "tiles", lambda real: tiles)


@defect
def every_nth_key_is_read_as_if_they_were_neighbours(plant):
    def bend(real):
        def strided(piece, row, col):
            tile = real(piece, row, col)
            return tile._replace(cols=range(tile.cols.start, tile.cols.start + len(tile.cols)))

        return strided

    plant(geometry, "_strided", bend)


@defect
def the_farthest_hop_of_a_ring_is_skipped_though_it_is_needed(plant):
    plant(plan, "_shifts", lambda real: lambda *plan: real(*plan)[:-1])


@defect
def the_last_key_that_a_mask_touches_does_not_travel(plant):
    def bend(real):
        def touched(run, pieces):
            *others, last = real(run, pieces)
            kept = last.positions[:-1]
            return (*others, type(last).of(kept)) if kept else tuple(others)

        return touched

    plant(geometry, "_touched", bend)


# ---- the wire ------------------------------------------------------------------------------------------------------


@defect
def the_wrong_half_of_a_shard_is_sent(plant):
    def bend(real):
        return lambda buffer, *args, **whole: real(buffer.roll(len(buffer) // 2, 0), *args, **whole)

    plant(lane, "send_views", bend)


@defect
def a_run_begins_one_position_too_early(plant):
    def bend(real):
        return lambda buffer, *args, **whole: real(buffer.roll(1, 0), *args, **whole)

    plant(lane, "send_views", bend)


@defect
def keys_and_values_change_places_in_the_packed_buffer(plant):
    plant(lane, "pack", lambda real: lambda key, value: real(value, key))


@defect
def shards_are_packed_as_if_they_were_contiguous(plant):
    def contiguous(x):
        return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())

    plant(lane, "pack", lambda real: lambda key, value: real(contiguous(key), contiguous(value)))


@defect
def a_message_of_many_runs_is_laid_out_from_the_back(plant):
    plant(StagedMessage, "land", lambda real: lambda self: real(StagedMessage(self.buffer.flip(0), self._pieces)))


@defect
def own_keys_are_left_out_of_the_arena(plant):
    def lay_own(self, arena, places, step):
        for rows in places.slices(step.own):
            arena.key[:, :, rows], arena.value[:, :, rows] = 0.0, 0.0

    plant(Lane, "_copy_own", lambda real: lay_own)


@defect
def a_ring_hands_on_its_own_keys_at_every_hop(plant):
    def bend(real):
        def send_views(self, transfer):
            self._ring_buffer = None
            return real(self, transfer)

        return send_views

    plant(Lane, "_send_views", bend)


def _stale(real):
    """At the third step, `real` sees the arena of the second, where they are of one size."""

    def method(self, step, arena, *rest):
        index, kept = self.steps.index(step), self.__dict__.setdefault("_kept", {})
        kept[index] = arena
        stale = index == 2 and kept[1].key.shape == arena.key.shape
        return real(self, step, kept[1] if stale else arena, *rest)

    return method


@defect
def at_the_second_hop_forward_still_sees_the_keys_of_the_first(plant):
    plant(Lane, "forward", _stale)


@defect
def at_the_second_hop_backward_still_sees_the_keys_of_the_first(plant):
    plant(Lane, "backward", _stale)


def _early(real):
    """Finish without having waited."""

    def wait(self):
        self._pending = Pending()
        return real(self)

    return wait


@defect
def keys_are_read_before_they_have_arrived(plant):
    plant(loop.KeyExchange, "wait", _early)


@defect
def gradients_are_added_before_they_have_arrived(plant):
    plant(loop.GradientExchange, "wait", _early)


# ---- the kernel ----------------------------------------------------------------------------------------------------


@defect
def a_general_tile_is_computed_as_a_full_one(plant):
    def seen(tile):
        return unmasked(tile) if tile.kind == "general" else tile

    bend_kernels(
        plant,
        lambda kernel, spec, q, k, v, tile: kernel.forward(spec, q, k, v, seen(tile)),
        lambda kernel, *args: kernel.backward(*args[:-1], seen(args[-1])),
    )


@defect
def a_causal_tile_also_sees_the_next_key(plant):
    def seen(tile):
        return tile._replace(hi=1) if tile.kind == "causal" else tile

    bend_kernels(
        plant,
        lambda kernel, spec, q, k, v, tile: kernel.forward(spec, q, k, v, seen(tile)),
        lambda kernel, *args: kernel.backward(*args[:-1], seen(args[-1])),
    )


@defect
def a_window_is_one_key_too_narrow(plant):
    def seen(tile):
        return tile._replace(lo=tile.lo + 1) if 1 - len(tile.rows) < tile.lo < tile.hi else tile

    bend_kernels(
        plant,
        lambda kernel, spec, q, k, v, tile: kernel.forward(spec, q, k, v, seen(tile)),
        lambda kernel, *args: kernel.backward(*args[:-1], seen(args[-1])),
    )


@defect
def backward_ignores_the_mask(plant):
    bend_kernels(plant, backward=lambda kernel, *args: kernel.backward(*args[:-1], unmasked(args[-1])))


@defect
def lse_is_in_base_two(plant):
    def forward(kernel, *args):
        out, lse = kernel.forward(*args)
        return out, lse / math.log(2)

    bend_kernels(plant, forward)


@defect
def query_heads_take_key_heads_in_turn_instead_of_in_groups(plant):
    def forward(kernel, spec, q, k, v, tile):
        group = q.shape[1] // k.shape[1]
        out, lse = kernel.forward(spec, _dealt(q, group), k, v, tile)
        return _dealt(out, k.shape[1]), _dealt(lse, k.shape[1])

    def backward(kernel, spec, grad, q, k, v, out, lse, tile):
        group = q.shape[1] // k.shape[1]
        grad, q, out, lse = (_dealt(x, group) for x in (grad, q, out, lse))
        dq, dk, dv = kernel.backward(spec, grad, q, k, v, out, lse, tile)
        return _dealt(dq, k.shape[1]), dk, dv

    bend_kernels(plant, forward, backward)


def _dealt(x, rows):
    """Heads written in `rows` rows, read by columns."""
    return x.unflatten(1, (rows, -1)).transpose(1, 2).flatten(1, 2).contiguous()


@defect
def only_the_first_query_head_of_a_group_gives_gradients_to_its_key_head(plant):
    def backward(kernel, spec, grad, q, k, v, out, lse, tile):
        firsts = [x[:, :: q.shape[1] // k.shape[1]] for x in (grad, q, out, lse)]
        dq, _, _ = kernel.backward(spec, grad, q, k, v, out, lse, tile)
        _, dk, dv = kernel.backward(spec, firsts[0], firsts[1], k, v, *firsts[2:], tile)
        return dq, dk, dv

    bend_kernels(plant, backward=backward)


@defect
def backward_uses_the_out_and_lse_of_its_tile_instead_of_the_final_ones(plant):
    def backward(kernel, spec, grad, q, k, v, out, lse, tile):
        return kernel.backward(spec, grad, q, k, v, *kernel.forward(spec, q, k, v, tile), tile)

    bend_kernels(plant, backward=backward)


@defect
def backward_leaves_out_the_correction_by_grad_times_out(plant):
    def backward(kernel, spec, grad, q, k, v, out, lse, tile):
        return kernel.backward(spec, grad, q, k, v, torch.zeros_like(out), lse, tile)

    bend_kernels(plant, backward=backward)


@defect
def the_scale_that_was_asked_for_is_ignored(plant):
    plant(BoundPlan, "spec", lambda real: lambda self, inputs: Spec(inputs.query.shape[-1] ** -0.5))


@defect
def backward_forgets_to_scale_the_gradient_of_keys(plant):
    def backward(kernel, spec, *args):
        dq, dk, dv = kernel.backward(spec, *args)
        return dq, dk / spec.scale, dv

    bend_kernels(plant, backward=backward)


# ---- the merge -----------------------------------------------------------------------------------------------------


@defect
def the_merge_forgets_to_rescale(plant):
    """What was there keeps its weight when more keys arrive."""

    def merge(into, a, b):
        lse = torch.logaddexp(a.lse, b.lse)
        share = (b.lse - lse).exp().nan_to_num(0.0).unsqueeze(-1)
        into.out.copy_(a.out + share * b.out)
        into.lse.copy_(lse)

    plant(accumulator, "merge", lambda real: merge)


@defect
def the_merge_takes_the_mean_of_two_parts(plant):
    def bend(real):
        def merge(into, a, b):
            mean = (a.out + b.out) / 2
            real(into, a, b)
            into.out.copy_(mean)

        return merge

    plant(accumulator, "merge", bend)


@defect
def the_merged_lse_is_the_larger_of_the_two(plant):
    def bend(real):
        def merge(into, a, b):
            larger = torch.maximum(a.lse, b.lse)
            real(into, a, b)
            into.lse.copy_(larger)

        return merge

    plant(accumulator, "merge", bend)


@defect
def a_row_that_sees_nothing_becomes_nan(plant):
    def bend(real):
        def result(self, dtype):
            out, lse = real(self, dtype)
            return out.masked_fill((lse == -torch.inf).unsqueeze(-1), torch.nan), lse

        return result

    plant(Accumulator, "result", bend)


@defect
def a_row_that_sees_nothing_has_lse_zero(plant):
    def bend(real):
        def result(self, dtype):
            out, lse = real(self, dtype)
            return out, lse.masked_fill(lse == -torch.inf, 0.0)

        return result

    plant(Accumulator, "result", bend)


# ---- gradients of keys ---------------------------------------------------------------------------------------------


@defect
def the_last_gradient_of_a_row_overwrites_those_before_it(plant):
    def bend(real):
        def gather(self, rows, *stacks, **wait):
            self._settle()
            for view in self._sum.views if self._sum else ():
                view[:, :, rows.start : rows.stop : rows.step] = 0.0
            real(self, rows, *stacks, **wait)

        return gather

    plant(DeferredSum, "gather", bend)


@defect
def a_row_without_gradients_keeps_what_was_in_memory(plant):
    def bend(real):
        def result(self, dtype):
            seen = {row for each in self._waiting for row in each.rows}
            seen |= {row for row, written in enumerate(self._sum._seen) if written} if self._sum else set()
            found = real(self, dtype)
            for view in found:
                view[:, :, [row for row in range(view.shape[2]) if row not in seen]] = 1.0
            return found

        return result

    plant(DeferredSum, "result", bend)


@defect
def gradients_of_own_keys_are_not_added(plant):
    plant(Lane, "_add_own", lambda real: lambda self, step, keys, grads: None)


@defect
def gradients_of_keys_go_to_the_wrong_owner(plant):
    def bend(real):
        def gradient_messages(self, *args):
            sends, arrivals = real(self, *args)
            parts = [part for _, part in sends]
            return [(to, part) for (to, _), part in zip(sends, parts[1:] + parts[:1], strict=True)], arrivals

        return gradient_messages

    plant(Lane, "gradient_messages", bend)


@defect
def gradients_that_come_home_are_added_one_row_off(plant):
    plant(ReturningGradients, "parts", lambda real: lambda self: ((run, parts.roll(1, 1)) for run, parts in real(self)))


@defect
def gradients_that_come_home_are_not_added(plant):
    plant(Lane, "add_returned_gradients", lambda real: lambda self, *args: None)


@defect
def of_gradients_that_several_ranks_send_only_the_first_is_added(plant):
    def bend(real):
        def parts(self):
            self._together = {run: buffer[:1] for run, buffer in self._together.items()}
            return real(self)

        return parts

    plant(ReturningGradients, "parts", bend)


@defect
def gradients_of_many_runs_in_one_message_are_taken_apart_from_the_back(plant):
    def bend(real):
        def parts(self):
            self._apart = [(transfer, buffer.flip(0)) for transfer, buffer in self._apart]
            return real(self)

        return parts

    plant(ReturningGradients, "parts", bend)


# ---- heads for sequence --------------------------------------------------------------------------------------------


@defect
def heads_come_back_in_the_wrong_order(plant):
    def bend(real):
        def by_head(self, parts, side):
            return real(self, parts[::-1] if side == "query" else parts, side)

        return by_head

    plant(HeadAllToAll, "_by_head", bend)


@defect
def tokens_of_a_group_lie_in_the_order_of_ranks_instead_of_positions(plant):
    plant(HeadAllToAll, "_by_position", lambda real: lambda self, parts, side: torch.cat(parts, dim=2))


@defect
def gradients_of_key_heads_that_several_ranks_took_are_not_summed(plant):
    def bend(real):
        def by_head(self, parts, side):
            whole = real(self, parts, side)
            for member, part in enumerate(parts):
                whole[:, self.heads(member, side)] = part
            return whole

        return by_head

    plant(HeadAllToAll, "_by_head", bend)


@defect
def groups_send_to_the_ranks_that_have_the_numbers_of_groups(plant):
    plant(Step, "between", lambda real: lambda self, degree, place: self)


# ---- sinks and lse -------------------------------------------------------------------------------------------------


@defect
def the_sink_is_counted_on_every_rank(plant):
    """Of two ranks, as if each had folded it into its part."""

    def bend(real):
        return lambda out, lse, sinks: real(*real(out, lse, sinks), sinks)

    plant(ops, "with_sinks", bend)


@defect
def the_sink_is_forgotten(plant):
    plant(ops, "with_sinks", lambda real: lambda out, lse, sinks: (out, lse))


@defect
def the_sink_changes_lse_but_not_out(plant):
    plant(ops, "with_sinks", lambda real: lambda out, lse, sinks: (out, real(out, lse, sinks)[1]))


@defect
def the_gradient_of_the_sink_is_not_reduced_over_ranks(plant):
    plant(World, "all_reduce", lambda real: lambda self, tensor, what="": Pending())


@defect
def the_gradient_of_lse_is_dropped(plant):
    plant(ops, "MergedOutputs", lambda real: lambda grad, grad_lse, *rest: real(grad, None, *rest))


@defect
def the_gradient_of_lse_reaches_queries_but_not_keys(plant):
    def bend(real):
        def through_lse(self, *request):
            dq, dk = real(self, *request)
            return dq, torch.zeros_like(dk)

        return through_lse

    plant(PerTile, "_through_lse", bend)


# ---- programs ------------------------------------------------------------------------------------------------------


@defect
def programs_see_the_positions_of_the_shard(plant):
    """As torch's own context parallelism does with a score_mod."""

    def bend(real):
        return lambda runs, device: torch.arange(len(real(runs, device)), device=device)

    plant(lane, "positions", bend)


@defect
def programs_see_heads_counted_from_the_first_of_a_share(plant):
    plant(
        lane,
        "GlobalPositions",
        lambda real: lambda rows, cols, batch, heads, runs: real(rows, cols, batch, range(len(heads)), runs),
    )


@defect
def programs_see_batch_rows_counted_from_the_first_of_a_lane(plant):
    plant(
        lane,
        "GlobalPositions",
        lambda real: lambda rows, cols, batch, heads, runs: real(rows, cols, range(len(batch)), heads, runs),
    )


@defect
def partial_blocks_are_taken_for_full(plant):
    def bend(real):
        return lambda self, rank, arena: tuple(tile._replace(needs_mask_mod=False) for tile in real(self, rank, arena))

    plant(Geometry, "tiles", bend)


@defect
def the_mask_of_the_first_head_is_used_for_all(plant):
    def bend(real):
        def over(self, *arguments, captured=None):
            b, h, q, k = arguments[-4:]
            return real(self, *arguments[:-4], b, h if len(arguments) > 4 else h * 0, q, k, captured=captured)

        return over

    plant(Program, "over", bend)


@defect
def scores_are_changed_forward_but_not_backward(plant):
    def bend(real):
        def pulled(spec, raw, block, step, sums, slope, shares):
            return slope(raw), real(spec, raw, block, step, sums, slope, shares)[1]

        return pulled

    plant(blocks, "_pulled", bend)


@defect
def the_slope_of_a_score_mod_is_taken_to_be_one(plant):
    def bend(real):
        def vjp(self, score, indices, captured, sums, grad, shares):
            _, rows = real(self, score, indices, captured, sums, grad, shares)
            return grad(self.over(score, *indices, captured=captured).expand(score.shape)), rows

        return vjp

    plant(Program, "vjp", bend)


@defect
def the_gradient_of_a_captured_tensor_is_not_reduced_over_ranks(plant):
    plant(ops, "_over_ranks", lambda real: lambda call, part, x: x.new_empty(0) if part is None else part.to(x.dtype))


@defect
def the_gradient_of_a_captured_tensor_is_counted_once_per_rank(plant):
    plant(ops, "_over_ranks", lambda real: lambda call, part, x: real(call, part, x) * call.plan.ranks)


@defect
def only_the_last_block_counts_for_a_captured_tensor(plant):
    def bend(real):
        def vjp(self, score, indices, captured, sums, grad, shares):
            for total in sums:
                if total is not None:
                    total.zero_()
            return real(self, score, indices, captured, sums, grad, shares)

        return vjp

    plant(Program, "vjp", bend)


@defect
def the_gradient_of_lse_does_not_reach_programs(plant):
    plant(MergedOutputs, "delta", lambda real: lambda self: real(replace(self, grad_lse=None)))


# ---- dropout -------------------------------------------------------------------------------------------------------


def _dropped_at(plant: Plant, place: Callable) -> None:
    plant(Dropout, "at", lambda real: lambda self, at: real(self, place(*at)))


@defect
def dropout_counts_queries_from_the_first_of_a_tile(plant):
    _dropped_at(plant, lambda b, h, q, k: [b, h, torch.arange(len(q)), k])


@defect
def dropout_counts_keys_from_the_first_of_a_tile(plant):
    _dropped_at(plant, lambda b, h, q, k: [b, h, q, torch.arange(len(k))])


@defect
def dropout_counts_heads_from_the_first_of_a_rank(plant):
    _dropped_at(plant, lambda b, h, q, k: [b, torch.arange(len(h)), q, k])


@defect
def dropout_counts_batch_rows_from_the_first_of_a_lane(plant):
    _dropped_at(plant, lambda b, h, q, k: [torch.arange(len(b)), h, q, k])


@defect
def every_rank_drops_by_a_seed_of_its_own(plant):
    def bend(real):
        def spec(self, inputs):
            found = real(self, inputs)
            return found if found.dropout is None else replace(found, dropout=Dropout(found.dropout.p, self.rank))

        return spec

    plant(BoundPlan, "spec", bend)


@defect
def what_is_kept_is_not_scaled(plant):
    plant(Dropout, "weights", lambda real: lambda self, dtype: real(self, dtype) * (1 - self.p))


@defect
def what_is_dropped_is_kept_and_what_is_kept_is_dropped(plant):
    plant(Dropout, "weights", lambda real: lambda self, dtype: 1 / (1 - self.p) - real(self, dtype))


@defect
def forward_drops_and_backward_does_not(plant):
    plant(blocks, "backward", lambda real: lambda spec, *rest: real(replace(spec, dropout=None), *rest))


@defect
def the_gradient_of_probabilities_is_not_dropped(plant):
    plant(blocks, "_dropped", lambda real: lambda x, weights: real(x, weights) if (x >= 0).all() else x)
