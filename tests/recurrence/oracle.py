"""Recurrences token by token, written from the laws and sharing nothing with what they judge. Slow and obvious.

Tensors are whole: (B, S, H, ...). `lengths` are the documents of each batch row. States are lists over documents, row
after row.
"""

import torch


def documents(lengths):
    """(row, first, stop) of every document, row after row."""
    for row, each in enumerate(lengths):
        first = 0
        for length in each:
            yield row, first, first + length
            first += length


def walked(batch, seq_len, lengths, states, token):
    """``token(row, place, state) -> (out, state)`` over all documents: outputs (B, S, ...) and the last states."""
    outs = [[None] * seq_len for _ in range(batch)]
    ends = []
    for (row, first, stop), state in zip(documents(lengths), states, strict=True):
        for place in range(first, stop):
            outs[row][place], state = token(row, place, state)
        ends.append(state)
    return torch.stack([torch.stack(row) for row in outs]), torch.stack(ends)


def attending(query, key, value, decay, beta, scale, lengths, states):
    """GatedDelta, KDA, GLA and Lightning; decay and beta may be None."""
    batch, seq_len, heads = value.shape[:3]
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))

    def token(row, place, state):
        if decay is not None:
            g = decay if decay.dim() == 1 else decay[row, place]
            state = g.exp().reshape(heads, -1, 1) * state
        k, v = key[row, place], value[row, place]
        if beta is not None:
            v = beta[row, place].unsqueeze(-1) * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + torch.einsum("hk,hv->hkv", k, v)
        return scale * torch.einsum("hk,hkv->hv", query[row, place], state), state

    return walked(batch, seq_len, lengths, states, token)


def ssd(x, dt, a, b, c, d, lengths, states):
    """Mamba2, states (H, V, K)."""
    batch, seq_len, heads = x.shape[:3]
    b, c = (each.repeat_interleave(heads // each.shape[2], 2) for each in (b, c))

    def token(row, place, state):
        step = dt[row, place].view(-1, 1, 1)
        new = torch.einsum("hv,hk->hvk", x[row, place], b[row, place])
        state = (step * a.view(-1, 1, 1)).exp() * state + step * new
        y = torch.einsum("hvk,hk->hv", state, c[row, place])
        return y if d is None else y + d.unsqueeze(-1) * x[row, place], state

    return walked(batch, seq_len, lengths, states, token)


def conv1d(x, weight, bias, lengths):
    """(B, S, channels), a filter (channels, width) for each: its last column meets the token itself."""
    outs = torch.zeros_like(x)
    width = weight.shape[1]
    rows = []
    for row, first, stop in documents(lengths):
        for place in range(first, stop):
            taps = [weight[:, i] * x[row, p] for i in range(width) if (p := place - (width - 1 - i)) >= first]
            rows.append(sum(taps) + (0 if bias is None else bias))
    return torch.stack(rows).view_as(outs)
