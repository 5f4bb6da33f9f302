"""What a mask cannot be, and what it says then. Messages are compared whole."""

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention

from attnspan import masks
from attnspan.errors import MaskError
from attnspan.masks import BlockSparse, Causal, Documents, KeyPadding, MaskMod, PrefixLM, SlidingWindow

PADDING = "give the padding at the end a document of its own"
NEEDS_TOKENS = "each document needs at least one token"
NO_LIMIT = "no limit is Causal() or Full()"
READS_HEADS = "reads its head index; say how many heads it tells apart: MaskMod(fn, heads=...)"

REFUSED = {
    # sizes and windows
    "SlidingWindow(-1)": f"left must be a whole number >= 0, got -1; {NO_LIMIT}",
    "SlidingWindow(4, -2)": f"right must be a whole number >= 0, got -2; {NO_LIMIT}",
    "SlidingWindow(4.0)": f"left must be a whole number >= 0, got 4.0 (float); {NO_LIMIT}",
    "SlidingWindow('4')": f"left must be a whole number >= 0, got '4'; {NO_LIMIT}",
    "SlidingWindow(None)": f"left must be a whole number >= 0, got None; {NO_LIMIT}",
    "SlidingWindow(True)": f"left must be a whole number >= 0, got True; {NO_LIMIT}",
    "Chunked(0)": "size must be a whole number >= 1, got 0",
    "Chunked(-3)": "size must be a whole number >= 1, got -3",
    "Chunked(2.5)": "size must be a whole number >= 1, got 2.5 (float)",
    "SinkTokens(0)": "n must be a whole number >= 1, got 0",
    "SinkTokens('x')": "n must be a whole number >= 1, got 'x'",
    "PrefixLM(-1)": "length must be a whole number >= 0, got -1",
    "PrefixLM([3, 1.5])": "length[1] must be a whole number >= 0, got 1.5 (float)",
    "PrefixLM([])": "length must be a whole number or one per batch row, got an empty list",
    "PrefixLM('3')": "length must be a whole number >= 0, got '3'",
    "PrefixLM(torch.tensor([1.0]))": "length[0] must be a whole number >= 0, got 1.0 (float)",
    "KeyPadding([2, -1])": "lengths[1] must be a whole number >= 0, got -1",
    "KeyPadding([2, [1]])": "lengths[1] must be a whole number >= 0, got [1]",
    "KeyPadding(torch.tensor([True]))": "lengths[0] must be a whole number >= 0, got True",
    "KeyPadding(())": "lengths must be a whole number or one per batch row, got an empty list",
    # alignment
    "Causal(align='bottm')": "align must be one of top, bottom, got 'bottm'; did you mean 'bottom'?",
    "Causal(align=0)": "align must be one of top, bottom, got 0",
    "Chunked(2, align='left')": "align must be one of top, bottom, got 'left'",
    # documents
    "Documents([])": "lengths must be a list of document lengths, or one list per batch row, got []",
    "Documents(8)": "lengths must be a list of document lengths, or one list per batch row, got 8",
    "Documents(None)": "lengths must be a list of document lengths, or one list per batch row, got None",
    "Documents('35')": "lengths must be a list of document lengths, or one list per batch row, got '35'",
    "Documents(torch.tensor(3))": (
        "lengths must be a list of document lengths, or one list per batch row, got tensor(3)"
    ),
    "Documents([3, 0, 5])": f"lengths[1] must be a whole number >= 1, got 0; {NEEDS_TOKENS}",
    "Documents([3, -5])": f"lengths[1] must be a whole number >= 1, got -5; {NEEDS_TOKENS}",
    "Documents([3, 5.0])": f"lengths[1] must be a whole number >= 1, got 5.0 (float); {NEEDS_TOKENS}",
    "Documents([3, True])": f"lengths[1] must be a whole number >= 1, got True; {NEEDS_TOKENS}",
    "Documents([3, [5]])": f"lengths[1] must be a whole number >= 1, got [5]; {NEEDS_TOKENS}",
    "Documents([[3, 5], 8])": (f"lengths[1] must be a list of whole numbers >= 1, got 8; {NEEDS_TOKENS}"),
    "Documents([[3, 5], ['8']])": f"lengths[1][0] must be a whole number >= 1, got '8'; {NEEDS_TOKENS}",
    "Documents([[]])": "lengths[0] must hold at least one document, got an empty list",
    "Documents([[8], []])": "lengths[1] must hold at least one document, got an empty list",
    "Documents([[3, 5], [3, 4]])": (
        f"lengths must sum to the same length in every batch row, got sums [8, 7]; {PADDING}"
    ),
    "Documents([3, 5], kv_lengths=[4])": (
        "kv_lengths must hold as many documents as lengths, per batch row [2], got [1]"
    ),
    "Documents([3, 5], kv_lengths=[4, 0])": (f"kv_lengths[1] must be a whole number >= 1, got 0; {NEEDS_TOKENS}"),
    "Documents.from_cu_seqlens([0])": "cu_seqlens must start at 0 and hold at least one document, got [0]",
    "Documents.from_cu_seqlens([1, 3])": ("cu_seqlens must start at 0 and hold at least one document, got [1, 3]"),
    "Documents.from_cu_seqlens([0, 3, 3])": (
        "cu_seqlens must rise at every document, got 3 and then 3 at 2; leave out empty documents"
    ),
    "Documents.from_cu_seqlens([0, 5, 3])": (
        "cu_seqlens must rise at every document, got 5 and then 3 at 2; leave out empty documents"
    ),
    "Documents.from_cu_seqlens([0, 2.5])": "cu_seqlens[1] must be a whole number >= 0, got 2.5 (float)",
    "Documents.from_cu_seqlens(8)": "cu_seqlens must be a list of whole numbers >= 0, got 8",
    "Documents.from_ids([])": "ids must be (S,) or (rows, S), none of them 0, got shape (0,)",
    "Documents.from_ids(3)": "ids must be (S,) or (rows, S), none of them 0, got shape ()",
    "Documents.from_ids([0.5, 1.0])": "ids must be whole numbers, got torch.float32",
    "Documents.from_ids([True, False])": "ids must be whole numbers, got torch.bool",
    "Documents.from_ids('aab')": "ids must be a whole number per token, (S,) or (rows, S), got 'aab'",
    "Documents.from_ids([[1, 1], [2]])": ("ids must be a whole number per token, (S,) or (rows, S), got [[1, 1], [2]]"),
    "Documents.from_position_ids([0.5, 1.0])": "position_ids must be whole numbers, got torch.float32",
    "Documents.from_position_ids([])": "position_ids must be (S,) or (rows, S), none of them 0, got shape (0,)",
    "KeyPadding.from_attention_mask([1, 0])": "attention_mask must be a tensor (S,) or (rows, S), got [1, 0]",
    "KeyPadding.from_attention_mask(torch.ones(1, 1, 2))": (
        "attention_mask must be a tensor (S,) or (rows, S), got (1, 1, 2)"
    ),
    "KeyPadding.from_attention_mask(torch.tensor([1, 2]))": "attention_mask must be ones and zeros, got other numbers",
    "KeyPadding.from_attention_mask(torch.tensor([[1, 1, 1], [0, 1, 1]]))": (
        "attention_mask must be ones and then zeros in every row, got 0 before the last 1 of row 1, at 0; pad on the "
        "right, or give other padding a document of its own"
    ),
    "Documents.from_ids([1, 1, 2, 1])": "ids must keep each document's tokens together, got id 1 again at 3",
    # trees
    "Tree([])": "parents must hold at least one node, got an empty list; a lone root is [-1]",
    "Tree([-1, 0], [2])": "lengths must hold one per node of parents (2), got 1",
    "Tree([-1, 0], [2, 0])": "lengths[1] must be a whole number >= 1, got 0",
    "Tree([-1, 2])": "parents[1] must be a node below 2 or -1, got 2",
    "Tree([-2])": "parents[0] must be a whole number >= -1, got -2",
    "Tree([-1, 0.0])": "parents[1] must be a whole number >= -1, got 0.0 (float)",
    "Tree([0])": "parents must form a tree, got a cycle through node 0; a root's parent is -1",
    "Tree([-1, 1])": "parents must form a tree, got a cycle through node 1; a root's parent is -1",
    "Tree([1, 2, 0])": "parents must form a tree, got a cycle through node 0; a root's parent is -1",
    "Tree([-1, 0, 3, 2])": "parents must form a tree, got a cycle through node 2; a root's parent is -1",
    "Tree(-1)": "parents must be a list of whole numbers >= -1, got -1",
    # block maps
    "BlockSparse([[1]], 0)": "block must be a whole number >= 1, got 0",
    "BlockSparse([[1]], 2.0)": "block must be a whole number >= 1, got 2.0 (float)",
    "BlockSparse([[1]], (2, -1))": "block[1] must be a whole number >= 1, got -1",
    "BlockSparse([[1]], (2, 2, 2))": "block must be one size or (query block, key block), got (2, 2, 2)",
    "BlockSparse([[1]], 'ab')": "block must be a whole number >= 1, got 'ab'",
    "BlockSparse([1, 0], 2)": (
        "map must be (blocks, blocks) or (rows, blocks, blocks), none of them 0, got shape (2,)"
    ),
    "BlockSparse([[]], 2)": (
        "map must be (blocks, blocks) or (rows, blocks, blocks), none of them 0, got shape (1, 0)"
    ),
    "BlockSparse([[1, 0], [1]], 2)": ("map must be a table of true and false, or one per batch row, got [[1, 0], [1]]"),
    "BlockSparse({}, 2)": "map must be a table of true and false, or one per batch row, got {}",
    "BlockSparse('1', 2)": "map must be a table of true and false, or one per batch row, got '1'",
    "BlockSparse([[1, 2]], 2)": "map must hold only true and false (or 1 and 0), got 2",
    "BlockSparse([[1, 0.5]], 2)": "map must hold only true and false (or 1 and 0), got 0.5",
    "Mask.from_dense([[True]])": (
        "allowed must be a bool tensor (q_len, kv_len) or (rows, q_len, kv_len), got [[True]]"
    ),
    "Mask.from_dense(torch.ones(2, 2))": (
        "allowed must be a bool tensor (q_len, kv_len) or (rows, q_len, kv_len), "
        "got a torch.float32 tensor of shape (2, 2)"
    ),
    "Mask.from_dense(torch.zeros(0, 2, dtype=torch.bool))": (
        "allowed must be a bool tensor (q_len, kv_len) or (rows, q_len, kv_len), "
        "got a torch.bool tensor of shape (0, 2)"
    ),
    "Mask.from_block_mask(Causal())": "block_mask must be a FlexAttention BlockMask, got Causal",
    "Mask.from_block_mask(flex_attention.create_block_mask(causal, 1, 2, 4, 4, device='cpu')).bands(4)": (
        "Mask.from_block_mask(1 rows, 2 heads, 4 x 4, causal) differs between its 2 heads; "
        "ask cover(), or dense(head=...)"
    ),
    "Mask.from_block_mask(flex_attention.create_block_mask(causal, 1, 1, 4, 4, device='cpu')).bands(8)": (
        "block_mask is for lengths (4, 4), got (8, 8); give the mask of the whole sequence, not a rank's part of it"
    ),
    "Causal().dense(4, head=-1)": "head must be a whole number >= 0, got -1",
    "MaskMod(by_head, heads=2).dense(4, head=2)": "head must be below the mask's 2 heads, got 2",
    "MaskMod(by_head, heads=2) & MaskMod(by_head, heads=3)": (
        "both sides of & must describe the same heads, got 2 and 3"
    ),
    "MaskMod(causal, heads=0)": "heads must be a whole number >= 1, got 0",
    "MaskMod(in_place)": ("in_place must not change tensors in place, got aten.logical_and_.default; return a new one"),
    # lengths that were asked about
    "Causal().bands(0)": "q_len must be a whole number >= 1, got 0",
    "Causal().bands(-4)": "q_len must be a whole number >= 1, got -4",
    "Causal().bands(4.0)": "q_len must be a whole number >= 1, got 4.0 (float)",
    "Causal().bands('4')": "q_len must be a whole number >= 1, got '4'",
    "Causal().work(4, 0)": "kv_len must be a whole number >= 1, got 0",
    "Causal().dense(True)": "q_len must be a whole number >= 1, got True",
    "Causal().bands(4, row=-1)": "row must be a whole number >= 0, got -1",
    "Causal().dense(4, row=0.5)": "row must be a whole number >= 0, got 0.5 (float)",
    "KeyPadding([1, 2]).bands(4, row=2)": "row must be below the mask's 2 batch rows, got 2",
    "KeyPadding([1, 2]).dense(4, row=2)": "row must be below the mask's 2 batch rows, got 2",
    "KeyPadding([1, 2]).check_rows(3)": ("batch must be the mask's 2 batch rows, got 3; give one entry per row"),
    "KeyPadding([1, 2]).check_rows(0)": "batch must be a whole number >= 1, got 0",
    "Causal().bands(4, 6)": (
        "align must be given when q_len (4) and kv_len (6) differ: "
        '"top" if query 0 meets key 0, "bottom" if the last query meets the last key'
    ),
    "Causal(align='bottom').mask_mod()": 'align="bottom" needs both lengths: call mask_mod(q_len, kv_len)',
    "Causal().mask_mod(kv_len=4)": "q_len must be given with kv_len, got None and 4",
    "Causal().mask_mod(0)": "q_len must be a whole number >= 1, got 0",
    "Documents([3, 5]).bands(9)": (f"lengths must sum to q_len (9), got 2 documents with sum 8; {PADDING}"),
    "Documents([3, 5]).bands(8, 9)": "kv_lengths must be given when q_len (8) and kv_len (9) differ",
    "Documents([3, 5], [2, 2]).bands(8, 9)": (
        f"kv_lengths must sum to kv_len (9), got 2 documents with sum 4; {PADDING}"
    ),
    "PrefixLM(9).bands(8)": "length must be at most kv_len (8), got 9 for batch row 0",
    "KeyPadding([8, 9]).bands(8, row=1)": "lengths must be at most kv_len (8), got 9 for batch row 1",
    "Tree([-1, 0], [2, 3]).bands(6)": ("lengths must sum to q_len (6) and kv_len (6), got 2 nodes with sum 5"),
    "Tree([-1, 0], [2, 3]).bands(5, 6)": ("lengths must sum to q_len (5) and kv_len (6), got 2 nodes with sum 5"),
    "BlockSparse([[1, 0], [1, 1]], 4).bands(9, 8)": ("map must hold 3 blocks of 4 to cover q_len (9), got 2"),
    "BlockSparse([[1, 0], [1, 1]], 4).bands(8, 4)": ("map must hold 1 blocks of 4 to cover kv_len (4), got 2"),
    # block masks
    "Causal().block_mask(8, block_size=0)": "block_size must be a whole number >= 1, got 0",
    "Causal().block_mask(8, block_size=1.5)": "block_size must be a whole number >= 1, got 1.5 (float)",
    "Causal().block_mask(8, block_size=(4, 0))": "block_size[1] must be a whole number >= 1, got 0",
    "Causal().block_mask(8, block_size=(4,))": ("block_size must be one size or (query block, key block), got (4,)"),
    "Causal().block_mask(8, block_size='128')": "block_size must be a whole number >= 1, got '128'",
    "Documents([3, 5]).block_mask(9)": (f"lengths must sum to q_len (9), got 2 documents with sum 8; {PADDING}"),
    # combining
    "KeyPadding([1, 2]) & Documents([[4], [4], [4]])": (
        "both sides of & must describe the same batch rows, got 2 and 3; give one entry per row, or one for all"
    ),
    "PrefixLM([1, 2]) | PrefixLM([1, 2, 3])": (
        "both sides of | must describe the same batch rows, got 2 and 3; give one entry per row, or one for all"
    ),
    "Causal() and Full()": (
        "a mask is neither true nor false; combine masks with &, | and ~, not with words: Causal()"
    ),
    "not Causal()": ("a mask is neither true nor false; combine masks with &, | and ~, not with words: Causal()"),
    # functions
    "MaskMod(3)": "fn must be a function (b, h, q_idx, kv_idx) -> bool tensor, got 3",
    "MaskMod(causal, rows=0)": "rows must be a whole number >= 1, got 0",
    "MaskMod(causal, block=0)": "block must be a whole number >= 1, got 0",
    "MaskMod(causal, lengths=(4, 6)).bands(4)": "causal is for lengths (4, 6), got (4, 4)",
    "MaskMod(causal, lengths=(4, 6)).dense(4)": "causal is for lengths (4, 6), got (4, 4)",
    "MaskMod(causal, lengths=(4, 0))": "lengths[1] must be a whole number >= 1, got 0",
    "MaskMod(causal, lengths=4)": "lengths must be (q_len, kv_len), got 4",
    "MaskMod(by_head)": f"by_head {READS_HEADS}",
    "MaskMod(by_head_table)": f"by_head_table {READS_HEADS}",
    "MaskMod(by_head_table, rows=4)": (f"by_head_table {READS_HEADS}"),
    "MaskMod(by_row)": ("by_row reads its batch index; say how many rows it tells apart: MaskMod(fn, rows=...)"),
    "MaskMod(by_row_table)": (
        "by_row_table reads its batch index; say how many rows it tells apart: MaskMod(fn, rows=...)"
    ),
    "MaskMod(number)": "number must return a bool tensor, got torch.int64",
    "MaskMod(text)": "text must return a bool tensor, got str",
    "MaskMod(two)": "two must return one bool for one pair of indices, got shape (2,)",
    "MaskMod(raising)": "raising could not be evaluated as a mask_mod: no such document",
    "MaskMod(three_arguments)": (
        "three_arguments could not be evaluated as a mask_mod: "
        "three_arguments() takes 3 positional arguments but 4 were given"
    ),
}


def causal(b, h, q, k):
    return k <= q


def by_head(b, h, q, k):
    return (k <= q) & (h >= 0)


def by_head_table(b, h, q, k):
    return q - k < TABLE[h]


def by_row(b, h, q, k):
    return k <= q + b


def by_row_table(b, h, q, k):
    return k < TABLE[b]


def number(b, h, q, k):
    return q - k


def text(b, h, q, k):
    return "yes"


def two(b, h, q, k):
    return torch.stack([q > k, q < k])


def raising(b, h, q, k):
    raise LookupError("no such document")


def three_arguments(b, q, k):
    return q > k


def branching(b, h, q, k):
    return k <= q if q > 3 else k < 1


def in_place(b, h, q, k):
    return (k <= q).logical_and_(k > 0)


TABLE = torch.tensor([1, 2, 3, 4])
NAMES = {**vars(masks), **globals(), "flex_attention": flex_attention}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_cannot_be_met_is_refused_with_a_reason(asked):
    with pytest.raises(MaskError) as refusal:
        eval(asked, NAMES)
    assert str(refusal.value) == REFUSED[asked]


def test_python_branches_on_indices_are_refused_when_the_mask_is_made():
    with pytest.raises(MaskError, match=r"^branching could not be evaluated as a mask_mod: .*control flow"):
        MaskMod(branching)


def test_a_function_that_fails_only_at_some_length_is_refused_there():
    mask = MaskMod(lambda b, h, q, k: TABLE[q] >= k)
    assert mask.work(4) == 13
    with pytest.raises(MaskError, match=r"^<lambda> could not be evaluated as a mask_mod: "):
        mask.bands(5)


def test_functions_may_depend_on_declared_rows_and_return_plain_bools():
    rows = MaskMod(by_row_table, rows=4)
    assert [rows.work(4, row=row) for row in range(4)] == [4, 8, 12, 16]
    assert MaskMod(lambda b, h, q, k: True).work(3) == 9
    assert MaskMod(causal) == MaskMod(causal) != MaskMod(lambda b, h, q, k: k < q)
    assert MaskMod(lambda b, h, q, k, left=2: q - k <= left).bands(4) == SlidingWindow(2, 4).bands(4)


def test_callables_need_not_be_hashable():
    class Window:
        __hash__ = None

        def __call__(self, b, h, q, k):
            return (q - k).abs() < 2

    assert MaskMod(Window()).bands(5) == SlidingWindow(1, 1).bands(5)
    assert repr(MaskMod(Window())) == "MaskMod(Window)"


def test_whole_numbers_of_every_kind_are_taken():
    assert KeyPadding(np.array([2, 3])) == KeyPadding([np.int64(2), 3]) == KeyPadding([2, 3])
    assert Documents(np.array([2, 3])) == Documents([np.int32(2), 3])
    assert SlidingWindow(np.int64(3)) == SlidingWindow(torch.tensor(3)) == SlidingWindow(3)
    assert Causal().work(np.int64(4)) == 10


def test_printing_never_raises():
    assert str(PrefixLM(20)).splitlines()[0] == "PrefixLM(20)"
    assert str(Documents([2, 1], kv_lengths=[1, 2])).splitlines()[1:] == ["█ · ·", "█ · ·", "· █ █"]
    assert str(BlockSparse([[1, 0]], block=(1, 2))).splitlines()[1:] == ["█ █ · ·"]
    hopeless = Documents([2, 1]) & Documents([2, 2])
    assert str(hopeless).splitlines()[1].startswith("(cannot be drawn: lengths must sum")


def test_a_good_mask_in_the_table_would_fail(monkeypatch):
    monkeypatch.setitem(REFUSED, "Full()", "never said")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_what_cannot_be_met_is_refused_with_a_reason("Full()")
