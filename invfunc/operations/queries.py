"""What does not compute: it asks about a tensor, hands out its memory or values, registers hooks or differentiates."""

from __future__ import annotations

from invfunc.operations.operation import define

define(
    "get:shape get:ndim get:dtype get:device get:is_cuda get:is_cpu get:is_nested get:is_sparse get:is_mkldnn get:is_quantized get:layout get:requires_grad get:is_leaf size dim ndimension numel nelement len stride is_contiguous is_floating_point is_complex get_device element_size is_same_size is_inference is_signed is_conj is_neg storage_offset result_type get:itemsize get:nbytes get:is_meta get:grad_fn",
    asks="form",
)
define("get:_version get:_cdata get:_base data_ptr untyped_storage", asks="memory")
define("grad backward", differentiates=True)
define("share_memory", keeps=True)
