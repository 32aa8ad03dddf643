"""The rules: op → one line of notation, or a function that writes the line from the op's arguments.

To add an op, add a line; ``notation.py`` explains the notation, and the tests check every line by
executing the op on shards.  Element-by-element ops without a line may be split anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from actorflow_compiler.signatures import rules
from actorflow_compiler.signatures.model import OpCall

Rule = str | Callable[[OpCall], str]
TABLE: dict[str, Rule] = {}


def _line(names: str, rule: Rule) -> None:
    TABLE.update(dict.fromkeys(names.split(), rule))


# linear, element by element
_line("neg clone alias detach mul.Scalar div.Scalar lift_fresh_copy _conj actorflow.identity actorflow.accumulate", ".+->.")
_line("actorflow.first", ".+,_->.")
_line("_to_copy", ".+->.")
_line("add.Tensor sub.Tensor lerp.Scalar copy", ".+,.+->.")
_line("mul.Tensor", ".*,.*->.")
_line("div.Tensor", ".+,.->.")
_line("where.self", ".,.+,.+->.")
_line("addcmul", ".+,.*,.*->.")
_line("addcdiv", ".+,.*,.->.")
_line("masked_fill.Scalar", ".,.,_->.")
_line("tril triu", ".YZ+,_->.YZ")
_line(
    "gelu_backward tanh_backward sigmoid_backward silu_backward threshold_backward elu_backward hardtanh_backward leaky_relu_backward "
    "hardsigmoid_backward hardswish_backward softplus_backward",
    ".+,.->.",
)
# matrix products
_line("mm", "mk*,kn*->mn")
_line("bmm", "bmk*,bkn*->bmn")
_line("addmm", "mn+,mk*,kn*->mn")
_line("baddbmm", "bmn+,bmk*,bkn*->bmn")
_line("mv", "mk*,k*->m")
_line("dot", "k*,k*->")
# along a dim
_line("_softmax _log_softmax _safe_softmax", ".,@->.")
_line("_softmax_backward_data _log_softmax_backward_data", ".+,.,@->.")
_line("sum.dim_IntList", ".+,@+->/")
_line("sum", ".+->")
_line("cumsum", ".+,@->.")
_line("amax amin any.dim all.dim argmax argmin", ".,@->/")
_line("max.dim min.dim", ".,@->/,/")
_line("sort topk", "_->_,_")
# normalisation and attention
_line("native_layer_norm", rules.layer_norm)
_line("native_layer_norm_backward", rules.layer_norm_backward)
_line("_scaled_dot_product_flash_attention_for_cpu", "bhSD,bhTD,bhTD,_,_,bhST->bhSD,bhS")
_line("_scaled_dot_product_flash_attention_for_cpu_backward", "bhSD+,bhSD,bhTD,bhTD,bhSD,bhS,_,_,bhST->bhSD,bhTD,bhTD")
# tables and losses
_line("embedding", "vd+,.<v>->.d")
_line("embedding_dense_backward", ".d+,.<v>,#v->vd")
_line("nll_loss_forward", "nC,n,C->,")
_line("nll_loss_backward", "+,nC,n,C,_,_,->nC")
_line("nll_loss2d_forward", "nCHW,nHW,C->,")
_line("nll_loss2d_backward", "+,nCHW,nHW,C,_,_,->nCHW")
_line("one_hot", ".->.Z")
# images
_line("convolution", rules.convolution)
_line("convolution_backward", rules.convolution_backward)
_line("max_pool2d_with_indices", rules.pool)
_line("avg_pool2d _adaptive_avg_pool2d", rules.linear_pool)
_line("max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward", rules.pool_backward)
_line("native_batch_norm _native_batch_norm_legit_no_training", "ncHW,c,c,c,c->ncHW|c")
# shapes
_line("t transpose.int", rules.transpose)
_line("permute", rules.permute)
_line("unsqueeze", rules.unsqueeze)
_line("squeeze.dim squeeze squeeze.dims", rules.squeeze)
_line("expand", rules.expand)
_line("slice.Tensor select.int unbind.int", rules.cut_dim)
_line("split.Tensor split_with_sizes", rules.split)
_line("cat", rules.cat)
_line("stack", rules.stack)
_line("view _unsafe_view reshape", rules.view)
_line("slice_backward select_backward", rules.backward_of_cut)
_line("constant_pad_nd", rules.pad)
_line("gather", rules.gather)
_line("index.Tensor", rules.index_tensor)
_line("actorflow.unpack actorflow.pack", rules.pieces)
# made out of nothing
_line("full zeros ones empty.memory_format", "[.]->.")
# optimizers: element by element; step counts and scalars are whole
_line("actorflow.adam", ".,.,.,.,.,,_,_->.,.,.,.")
_line("actorflow.sgd", ".,.,.,_,_->.,.")
_line("actorflow.adagrad", ".,.,.,,_,_->.,.")
