"""Op → notation, a line for each kind of op; the whole knowledge of what may be split.

To add an op, write its name (without ``aten.``, and without ``.default``) into the line of its kind,
or a new line with its term (``notation.py`` has the tokens).  Ops of our own carry their namespace:
``actorflow.first``.  Where the term depends on shapes or arguments, give a function of the OpCall
(``shaped_views.py``, ``shaped_layers.py``) instead.  Every line is verified by running the op on parts
of the samples in ``tests/signature_samples.py``, where one has to be added, too.
"""

from __future__ import annotations

from collections.abc import Callable

from actorflow_compiler.signatures import shaped_layers as layers
from actorflow_compiler.signatures import shaped_views as views
from actorflow_compiler.signatures.call import OpCall

Line = str | Callable[[OpCall], str | None]

_LINES: tuple[tuple[str, Line], ...] = (
    # one operand, not linear
    (
        "abs acos acosh asin asinh atan atanh bitwise_not bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar "
        "ceil celu clamp clamp_max clamp_min cos cosh digamma elu eq.Scalar erf erfc erfinv exp exp2 expm1 "
        "fill.Scalar floor fmod.Scalar full_like ge.Scalar gelu gt.Scalar hardsigmoid hardswish hardtanh isfinite "
        "isinf isnan le.Scalar leaky_relu lgamma log log10 log1p log2 logical_not logit lt.Scalar mish nan_to_num "
        "ne.Scalar ones_like pow.Tensor_Scalar reciprocal relu remainder.Scalar round rsqrt sgn sigmoid sign silu "
        "sin sinh softplus softshrink hardshrink sqrt square tan tanh threshold trunc zeros_like empty_like zero "
        "div.Scalar_mode",
        ".->.",
    ),
    # two and three operands, not linear
    (
        "atan2 bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor clamp_max.Tensor clamp_min.Tensor "
        "copysign.Tensor div.Tensor_mode eq.Tensor floor_divide fmod.Tensor ge.Tensor gt.Tensor hypot le.Tensor "
        "logaddexp logical_and logical_or logical_xor lt.Tensor max.other maximum min.other minimum ne.Tensor "
        "pow.Tensor_Tensor remainder.Tensor xlogy.Tensor fill.Tensor",
        ".,.->.",
    ),
    ("pow.Scalar", "_,.->."),
    ("clamp.Tensor", ".,.,.->."),
    ("log_sigmoid_forward", ".->.,."),
    # linear in all, in a factor, or in one of the operands
    ("neg clone alias detach lift_fresh lift_fresh_copy positive _to_copy mul.Scalar div.Scalar", ".+->."),
    ("add.Scalar sub.Scalar rsub.Scalar", ".+,+->."),
    ("add.Tensor sub.Tensor rsub.Tensor lerp.Scalar", ".+,.+->."),
    ("lerp.Tensor addcdiv", ".+,.+,.->."),
    ("mul.Tensor", ".*,.*->."),
    ("div.Tensor", ".+,.->."),
    ("addcmul", ".+,.*,.*->."),
    ("where.self", ".,.+,.+->."),
    ("where.ScalarOther", ".,.+,+->."),
    ("where.ScalarSelf", ".,+,.+->."),
    ("masked_fill.Scalar masked_fill.Tensor", ".+,.,+->."),
    ("copy", ".,.+->."),
    # backward of pointwise ops: linear in the gradient
    (
        "gelu_backward silu_backward mish_backward sigmoid_backward tanh_backward threshold_backward "
        "hardtanh_backward hardsigmoid_backward hardswish_backward leaky_relu_backward softplus_backward "
        "native_dropout_backward softshrink_backward hardshrink_backward",
        ".+,.->.",
    ),
    ("elu_backward", ".+,_,_,_,_,.->."),
    ("log_sigmoid_backward", ".+,.,.->."),
    # matrices
    ("mm", "mk*,kn*->mn"),
    ("bmm", "bmk*,bkn*->bmn"),
    ("addmm", "mn+,mk*,kn*->mn"),
    ("baddbmm", "bmn+,bmk*,bkn*->bmn"),
    ("mv", "mk*,k*->m"),
    ("addmv", "m+,mk*,k*->m"),
    ("dot", "k*,k*->"),
    ("linear", ".k*,nk*,n+->.n"),
    # along named dims
    ("sum", ".+->"),
    ("sum.dim_IntList", ".+,@->/"),
    ("nansum", ".,@->/"),
    ("mean.dim", ".+,@!->/"),
    (
        "amax amin any.dim any.dims all.dim all.dims argmax argmin logsumexp prod.dim_int var.correction "
        "std.correction",
        ".,@!->/",
    ),
    ("max.dim min.dim var_mean.correction std_mean.correction", ".,@!->/,/"),
    ("linalg_vector_norm", ".,_,@!->/"),
    ("cumsum flip", ".+,@->."),
    ("roll", ".+,_,@->."),
    ("cumprod logcumsumexp _softmax _log_softmax _safe_softmax", ".,@->."),
    ("_softmax_backward_data _log_softmax_backward_data", ".+,.,@->."),
    ("sort", ".,@->.,."),
    ("sort.stable topk", ".,_,@->.,."),
    ("tril triu", ".YZ+->.YZ"),
    # made from nothing but a shape
    ("full zeros ones empty.memory_format", "#->."),
    ("new_full new_zeros new_ones new_empty", "_,#->."),
    # positions and shapes
    ("view _unsafe_view reshape", views.view),
    ("t", "ab+->ba"),
    ("transpose.int", views.transpose),
    ("permute", views.permute),
    ("unsqueeze", views.unsqueeze),
    ("squeeze squeeze.dim squeeze.dims", views.squeeze),
    ("expand", views.expand),
    ("repeat", views.repeat),
    ("slice.Tensor", views.slice_),
    ("slice_backward", views.slice_backward),
    ("slice_scatter", views.slice_scatter),
    ("select.int", views.select),
    ("select_backward", views.select_backward),
    ("select_scatter", views.select_scatter),
    ("unbind.int", views.unbind),
    ("split.Tensor split.sizes split_with_sizes", views.split),
    ("cat", views.cat),
    ("stack", views.stack),
    ("constant_pad_nd", views.pad),
    ("gather", views.gather),
    ("scatter.src scatter.value", views.scatter),
    ("scatter_add", views.scatter_add),
    ("index_select", views.index_select),
    ("index_add", views.index_add),
    ("index.Tensor _unsafe_index.Tensor", views.index),
    ("index_put _unsafe_index_put _index_put_impl", views.index_put),
    # embedding
    ("embedding", "vd+,.<v>->.d"),
    ("embedding_dense_backward", layers.embedding_backward),
    ("actorflow.embedding_part", "vd+,.<v>->.d"),
    ("actorflow.embedding_part_backward", ".d+,.<v>->vd"),
    # attention: letters b batch, h head, s query, T key, D and E widths
    ("_scaled_dot_product_flash_attention_for_cpu", layers.attention),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", layers.attention_backward),
    ("_scaled_dot_product_flash_attention", "bhSD,bhTD,bhTE->bhSE,bhS,_,_,_,_,_,_,_"),
    ("_scaled_dot_product_flash_attention_backward", "bhSE+,bhSD,bhTD,bhTE,bhSE,bhS->bhSD,bhTD,bhTE"),
    ("_scaled_dot_product_efficient_attention", "bhSD,bhTD,bhTE,bhST->bhSE,bhL,_,_"),
    ("_scaled_dot_product_efficient_attention_backward", layers.efficient_attention_backward),
    ("_scaled_dot_product_cudnn_attention", "bhSD,bhTD,bhTE,bhST->bhSE,bhS1,_,_,_,_,_,_,_"),
    ("_scaled_dot_product_cudnn_attention_backward", "bhSE+,bhSD,bhTD,bhTE,bhSE,bhS1,_,_,bhST->bhSD,bhTD,bhTE"),
    # norms
    ("native_layer_norm", layers.layer_norm),
    ("native_layer_norm_backward", layers.layer_norm_backward),
    ("_fused_rms_norm", layers.rms_norm),
    ("_fused_rms_norm_backward", layers.rms_norm_backward),
    ("native_group_norm", layers.group_norm),
    ("native_group_norm_backward", layers.group_norm_backward),
    (
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats "
        "_native_batch_norm_legit_functional",
        layers.batch_norm,
    ),
    ("native_batch_norm_backward", layers.batch_norm_backward),
    # images
    ("convolution", layers.convolution),
    ("convolution_backward", layers.convolution_backward),
    ("max_pool2d_with_indices", ".cHW->.cXY,.cXY !c"),
    ("max_pool2d_with_indices_backward", ".cXY+,.cHW,_,_,_,_,_,.cXY->.cHW !c"),
    ("avg_pool2d _adaptive_avg_pool2d", ".cHW+->.cXY !c"),
    ("avg_pool2d_backward _adaptive_avg_pool2d_backward", ".cXY+,.cHW->.cHW !c"),
    (
        "upsample_nearest2d.vec upsample_nearest2d upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d",
        ".cHW+->.cXY !c",
    ),
    ("upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward", ".cXY+,_,#->.cHW !c"),
    # losses
    ("nll_loss_forward nll_loss2d_forward", layers.nll_loss),
    ("nll_loss_backward nll_loss2d_backward", layers.nll_loss_backward),
    # ops of our own
    ("actorflow.accumulate actorflow.identity", ".+->."),
    ("actorflow.first", ".+,_->."),
    ("actorflow.unpack", views.unpack),
    ("actorflow.pack", views.pack),
    ("actorflow.uniform", ".,_,_,_,,_,_->."),
    ("actorflow.adam", ".,.,.,.,.,,,->.,.,.,."),
    ("actorflow.sgd", ".,.,.,,->.,."),
    ("actorflow.adagrad", ".,.,.,,,->.,."),
)


def _name(short: str) -> str:
    if short.startswith("actorflow."):
        return short
    return f"aten.{short}" if "." in short else f"aten.{short}.default"


TABLE: dict[str, Line] = {_name(short): line for names, line in _LINES for short in names.split()}


def term_of(call: OpCall) -> str | None:
    """The term of an op instance; None where the table has none for it."""
    line = TABLE.get(call.op)
    return line(call) if callable(line) else line
