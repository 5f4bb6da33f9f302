"""A cache beside the dense tensors that it stands for.

`Cache` steps sequences with random queries, keys and values, keeps every sequence's keys and values whole, poisons
whatever slot belongs to nobody with NaN, and compares attention over pages with the oracle's.

Packed shapes: q (tokens, heads, dim); the oracle's are (1, heads, n, dim).
"""

import torch

from attnspan.masks import Causal
from attnspan.paged import PageAllocator, PageLayer, PagePool, StepPlan
from tests import oracle

NAN = float("nan")


class Cache:
    def __init__(self, *, page_size=4, pages=128, heads=4, kv_heads=2, dim=8, value_dim=0, dtype=torch.float64,
                 window=None, device="cpu", seed=0, max_sequences=8, max_tokens=256, max_length=400,
                 host_pages=0):  # fmt: skip
        self.allocator = PageAllocator(num_pages=pages, page_size=page_size, host_pages=host_pages)
        layer = PageLayer(kv_heads, dim, value_dim=value_dim, window=window, dtype=dtype)
        self.pool = PagePool(self.allocator, [layer], device=device)
        self.plan = StepPlan(self.pool, max_sequences=max_sequences, max_tokens=max_tokens, max_length=max_length)
        self.heads, self.layer, self.device = heads, self.pool.layers[0], device
        self.generator = torch.Generator().manual_seed(seed)
        self.k, self.v, self.q = {}, {}, {}
        self.rows = []
        self.poison()

    def random(self, *shape):
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.layer.dtype).to(self.device)

    def add(self, tokens=0):
        seq = self.allocator.add()
        self.k[seq], self.v[seq] = (
            self.random(0, self.layer.kv_heads, self.layer.head_dim),
            self.random(0, self.layer.kv_heads, self.layer.value_dim),
        )
        if tokens:
            self.step([(seq, tokens)])
        return seq

    def fork(self, seq, n):
        forks = self.allocator.fork(seq, n)
        for fork in forks:
            self.k[fork], self.v[fork] = self.k[seq], self.v[seq]
        return forks

    def trim(self, seq, length):
        self.allocator.trim(seq, length)
        self.k[seq], self.v[seq] = self.k[seq][:length], self.v[seq][:length]

    def step(self, batch, **options):
        """One step: queries, keys and values are drawn, written and remembered."""
        self.plan.step(batch, **options)
        self.poison(new=True)
        tokens = self.plan.tokens
        layer = self.layer
        q = self.random(tokens, self.heads, layer.head_dim)
        k, v = self.random(tokens, layer.kv_heads, layer.head_dim), self.random(tokens, layer.kv_heads, layer.value_dim)
        self.pool.write(0, k, v, self.plan)
        self.poison()
        self.rows, first = batch, 0
        for seq, new in batch:
            some = slice(first, first + new)
            self.k[seq], self.v[seq] = torch.cat([self.k[seq], k[some]]), torch.cat([self.v[seq], v[some]])
            first += new
        self.query = q
        return q

    def poison(self, new=False):
        """NaN in every slot that no sequence holds a token in; with `new`, in the slots of the coming tokens too."""
        owned = torch.zeros(self.allocator.num_pages, self.allocator.page_size, dtype=torch.bool)
        fresh = dict(zip(self.plan._seen[0], self.plan._metadata.query_lens, strict=False)) if new else {}
        for seq, row in self.allocator.sequences.items():
            for position in range(row.first, row.length - fresh.get(seq, 0)):
                if row.host is None:
                    owned[row.table[position // self.allocator.page_size], position % self.allocator.page_size] = True
        owned[torch.tensor(list(self.allocator.kept)).bool()] = True  # full pages
        for pages in (*self.pool.keys, *self.pool.values):
            pages.masked_fill_(~owned.to(pages.device)[:, :, None, None], NAN)

    def attend(self, **options):
        return self.pool.attend(0, self.query, self.plan, return_lse=True, **options)

    def expected(self, *, mask=None, score_mod=None, sinks=None, scale=None, window=None):
        """(out, lse) in float64 of the last step's queries, packed."""
        mask = Causal() if mask is None else mask
        scale = self.layer.head_dim**-0.5 if scale is None else scale
        window = window or self.layer.window
        outs, lses, first = [], [], 0
        for row, (seq, new) in enumerate(self.rows):
            length = len(self.k[seq])
            if new:
                q = self.query[first : first + new].cpu().double().transpose(0, 1)[None]
                k, v = (x.cpu().double().transpose(0, 1)[None] for x in (self.k[seq], self.v[seq]))
                allowed = dense(mask, length, row, self.heads)[..., length - new :, :]
                if window is not None:
                    at = torch.arange(length)
                    allowed = allowed & (at[length - new :, None] - at < window)
                scores = q @ oracle.per_query_head(k, q).mT * scale
                if score_mod is not None:
                    h, at = torch.arange(self.heads)[:, None, None], torch.arange(length)
                    scores = score_mod(scores, torch.tensor(row), h, at[length - new :, None], at)
                out, lse = oracle.dense(scores, allowed, [(allowed, oracle.per_query_head(v, q))])
                if sinks is not None:
                    total = torch.logaddexp(lse, sinks.cpu().double()[:, None])
                    out, lse = out * (lse - total).exp().nan_to_num(0.0)[..., None], total
                outs.append(out[0].transpose(0, 1))
                lses.append(lse[0].transpose(0, 1))
            first += new
        return torch.cat(outs), torch.cat(lses)


def alike_out_of_order():
    """Rows that share pages, the first further on than the last: queries over the shared pages are out of order."""
    cache = Cache(page_size=1, window=4)
    a = cache.add(9)
    b, c = cache.fork(a, 2)
    cache.trim(c, 7)
    cache.step([(a, 1), (b, 1), (c, 1)], share=True)
    assert cache.plan.shared
    return cache


def dense(mask, length, row, heads):
    """The mask of a row over a sequence that may still grow to the mask's own length."""
    full = mask.natural_len or length + 64
    row = row if mask.rows > 1 else 0
    return mask.dense(full, row=row)[:length, :length]


def words(options):
    """A test's name from its options: the same in every process, which functions' own are not."""
    shown = {
        name: value for name, value in options.items() if not isinstance(value, torch.Tensor) and not callable(value)
    }
    return (
        " ".join(
            [*(f"{name}={value!r}" for name, value in shown.items()), *(name for name in options if name not in shown)]
        )
        or "plain"
    )


TOLERANCES = {
    torch.float64: 1e-9,  # sums in another order
    torch.float32: 2e-5,
    torch.bfloat16: 3e-2,  # one rounding of out, and of the weights before they meet the values
    torch.float16: 4e-3,
}


def agree(found, wanted, dtype=torch.float64):
    """Hold (out, lse) to the oracle's."""
    tolerance = TOLERANCES[dtype]
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.cpu().double(), b, atol=tolerance, rtol=tolerance)
