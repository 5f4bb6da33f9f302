"""torch's attention kernels by their private names, called only if they still take and return what is known of them.

An op that began with an underscore may change its arguments between versions; given by position, they would then mean
something else. What is compared is the schema: the names of all arguments that are known, in order, that further ones
have defaults, and the number of results. No kernel runs for it.
"""

from __future__ import annotations

from typing import Any

import torch

from attnspan.assumptions import Assumption


class AtenOp:
    """A private op of torch: `arguments` are the names of those that are known, in order."""

    def __init__(self, name: str, arguments: str, returns: int, place: str):
        self.name, self.arguments, self.returns = name, arguments.split(), returns
        self.known = Assumption(
            f"`aten.{name}` has the arguments and results that are known",
            place,
            f"the schema of `torch.ops.aten.{name}`",
            self._matches,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.known.verify()
        return self.op(*args, **kwargs)

    @property
    def op(self) -> Any:
        return getattr(torch.ops.aten, self.name).default

    def _matches(self) -> bool:
        schema, known = self.op._schema, len(self.arguments)
        names = [each.name for each in schema.arguments]
        further = schema.arguments[known:]
        optional = all(each.has_default_value() for each in further)
        return names[:known] == self.arguments and optional and len(schema.returns) == self.returns


CPU_FLASH = AtenOp(
    "_scaled_dot_product_flash_attention_for_cpu",
    "query key value dropout_p is_causal attn_mask scale",
    2,
    "kernels/cpu_flash.py",
)
CPU_FLASH_BACKWARD = AtenOp(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
    3,
    "kernels/cpu_flash.py",
)
CUDA_FLASH = AtenOp(
    "_flash_attention_forward",
    "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale window_size_left "
    "window_size_right",
    5,
    "kernels/cuda_flash.py",
)
CUDA_FLASH_BACKWARD = AtenOp(
    "_flash_attention_backward",
    "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused scale "
    "window_size_left window_size_right",
    3,
    "kernels/cuda_flash.py",
)
CUDNN = AtenOp(
    "_scaled_dot_product_cudnn_attention",
    "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
    9,
    "kernels/cudnn.py",
)
CUDNN_BACKWARD = AtenOp(
    "_scaled_dot_product_cudnn_attention_backward",
    "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
    "dropout_p is_causal scale",
    3,
    "kernels/cudnn.py",
)
EFFICIENT = AtenOp(
    "_scaled_dot_product_efficient_attention",
    "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
    4,
    "kernels/efficient.py",
)
EFFICIENT_BACKWARD = AtenOp(
    "_scaled_dot_product_efficient_attention_backward",
    "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask is_causal "
    "scale",
    4,
    "kernels/efficient.py",
)
