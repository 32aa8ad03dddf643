"""The table op → notation, with a line for each kind of op: everything known about which ops may be split.

To add an op, write its name (without ``aten.``, and without ``.default``) into the line of its kind,
or a new line with its term (``notation.py`` has the tokens).  Ops of our own carry their namespace:
``actorflow.first``.  Where the term depends on shapes or arguments, give a function of the OpCall
(the files ``shaped_*.py``) instead.  Every line is verified by running the op on parts of the samples
in ``tests/signature_samples.py``, where one has to be added, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from actorflow_compiler.core.op_call import OpCall, overload
from actorflow_compiler.core.torch_internals import schema_of
from actorflow_compiler.signatures import shaped_index as at
from actorflow_compiler.signatures import shaped_layers as layers
from actorflow_compiler.signatures import shaped_losses as losses
from actorflow_compiler.signatures import shaped_views as views

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
        "pow.Tensor_Tensor remainder.Tensor _standard_gamma_grad actorflow.poisson_quantile",
        ".,.->.",
    ),
    ("pow.Scalar", "_,.->."),
    ("clamp.Tensor _dirichlet_grad actorflow.binomial_quantile", ".,.,.->."),
    ("log_sigmoid_forward", ".->.,."),
    # linear in all, in a factor, or in one of the operands
    (
        "neg clone alias alias_copy detach detach_copy lift_fresh lift_fresh_copy positive _to_copy mul.Scalar "
        "div.Scalar",
        ".+->.",
    ),
    ("add.Scalar sub.Scalar rsub.Scalar", ".+,+->."),
    ("add.Tensor sub.Tensor rsub.Tensor lerp.Scalar", ".+,.+->."),
    ("lerp.Tensor addcdiv", ".+,.+,.->."),
    ("mul.Tensor", ".*,.*->."),
    ("div.Tensor xlogy.Tensor", ".+,.->."),
    ("addcmul", ".+,.*,.*->."),
    ("where.self", ".,.+,.+->."),
    ("where.ScalarOther", ".,.+,+->."),
    ("where.ScalarSelf", ".,+,.+->."),
    ("masked_fill.Scalar masked_fill.Tensor", ".+,.,+->."),
    ("copy fill.Tensor", ".,.+->."),
    # backward of pointwise ops: linear in the gradient
    (
        "gelu_backward silu_backward mish_backward sigmoid_backward tanh_backward threshold_backward "
        "hardtanh_backward hardsigmoid_backward hardswish_backward leaky_relu_backward softplus_backward "
        "native_dropout_backward softshrink_backward hardshrink_backward logit_backward",
        ".+,.->.",
    ),
    ("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", ".,_,_,_->.,."),
    ("fake_quantize_per_tensor_affine_cachemask_backward", ".+,.->."),
    ("glu", views.glu),
    ("glu_backward", views.glu_backward),
    ("_prelu_kernel", ".,.->."),
    ("_prelu_kernel_backward", ".+,.,.->.,."),
    ("rrelu_with_noise_backward", ".+,.,.->."),
    ("elu_backward", ".+,_,_,_,_,.->."),
    ("log_sigmoid_backward", ".+,.,.->."),
    # matrices
    ("mm", "mk*,kn*->mn"),
    ("bmm", "bmk*,bkn*->bmn"),
    ("addmm", "mn+,mk*,kn*->mn"),
    ("baddbmm", "bmn+,bmk*,bkn*->bmn"),
    ("mv", "mk*,k*->m"),
    ("addmv", "m+,mk*,k*->m !mk"),
    ("dot vdot", "k*,k*->"),
    ("addr", "mn+,m*,n*->mn"),
    ("addbmm", "mn+,bmk*,bkn*->mn"),
    ("_int_mm", "mk,kn->mn"),
    ("_cdist_forward", ".mK,.nK->.mn"),
    ("_cdist_backward", ".mn+,.mk,.nk,_,.mn->.mk !.mnk"),
    ("_pdist_forward", "NK->L"),
    ("_pdist_backward", "L+,NK,_,L->NK"),
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
    ("kthvalue", ".,_,@!->/,/"),
    ("aminmax median.dim mode nanmedian.dim", ".,@!->/,/"),
    ("count_nonzero.dim_IntList var.dim std.dim", ".,@!->/"),
    ("norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype", ".,_,@!->/"),
    ("cummax cummin", ".,@->.,."),
    ("renorm", views.only),
    ("tril triu", ".YZ+->.YZ"),
    ("trace", "NM+->"),
    # the size or order of the output depends on the values of all elements
    ("nonzero nonzero_static masked_select bincount repeat_interleave.Tensor", "_->_"),
    ("_unique _unique2 unique_consecutive unique_dim unique_dim_consecutive", "_->_,_,_"),
    ("masked_scatter masked_scatter_backward", "_->_"),
    # over all elements: parts cannot give terms of the result
    ("mean", ":+->"),
    ("all any count_nonzero max min median nanmedian norm.Scalar prod", ":->"),
    ("dist", ":,:->"),
    # transforms; over complex numbers sums pass, too
    ("_fft_c2c _fft_c2r _fft_r2c", ".+,@->. !."),
    ("_conj _conj_physical", ".+->."),
    ("complex", ".+,.+->."),
    ("polar", ".+,.->."),
    ("view_as_real view_as_real_copy", ".+->.Z"),
    ("view_as_complex view_as_complex_copy", ".Z+->."),
    # matrix decompositions and systems of equations, one for each matrix of a batch
    ("cholesky cholesky_inverse linalg_matrix_exp", ".NM->.NM"),
    ("linalg_inv_ex linalg_cholesky_ex", ".NM->.NM,."),
    ("_linalg_det", ".NM->.,.NM,.N"),
    ("_linalg_slogdet", ".NM->.,.,.NM,.N"),
    ("_linalg_svd", ".NM->.NK,.L,.IM"),
    ("_linalg_eigh linalg_eig", ".NM->.N,.NM"),
    ("linalg_eigvals _linalg_eigvals", ".NM->.N"),
    ("linalg_qr", ".NM->.NK,.LM"),
    ("geqrf", ".NM->.NM,.K"),
    ("linalg_householder_product", ".NM,.K->.NM"),
    ("ormqr", layers.ormqr),
    ("linalg_lu", ".NM->.NJ,.NK,.LM"),
    ("linalg_lu_factor_ex", ".NM->.NM,.K,."),
    ("lu_unpack", ".NM,.K->.NJ,.NL,.KM"),
    ("linalg_lu_solve", layers.lu_solve),
    ("linalg_ldl_factor_ex", ".NM->.NM,.N,."),
    ("linalg_ldl_solve", ".NM,.N,.Nk+->.Nk"),
    ("cholesky_solve", ".Nk+,.NM->.Nk"),
    ("linalg_solve_triangular", layers.solve_triangular),
    ("triangular_solve", ".NK,.NM->.NK,.NM"),
    ("_linalg_solve_ex", layers.solve),
    ("linalg_pinv.atol_rtol_tensor", ".NM,.,.->.MN"),
    ("linalg_cross", ".*,.*,@->."),
    # made from nothing but a shape
    ("full zeros ones empty.memory_format empty_permuted empty_strided", "#->."),
    ("arange arange.start arange.start_step", views.arange),
    ("new_full new_zeros new_ones new_empty new_empty_strided", "_,#->."),
    ("eye eye.m linspace logspace scalar_tensor tril_indices triu_indices", "->_"),
    # positions and shapes
    ("view view_copy _unsafe_view reshape", views.view),
    ("t t_copy", "ab+->ba"),
    ("transpose.int transpose_copy.int", views.transpose),
    ("permute permute_copy", views.permute),
    ("unsqueeze unsqueeze_copy", views.unsqueeze),
    ("squeeze squeeze.dim squeeze.dims squeeze_copy squeeze_copy.dim squeeze_copy.dims", views.squeeze),
    ("expand expand_copy", views.expand),
    ("repeat", views.repeat),
    ("slice.Tensor slice_copy.Tensor", views.slice_),
    ("slice_backward", views.slice_backward),
    ("slice_scatter", views.slice_scatter),
    ("select.int select_copy.int", views.select),
    ("select_backward", views.select_backward),
    ("select_scatter", views.select_scatter),
    ("unbind.int unbind_copy.int", views.unbind),
    (
        "split.Tensor split.sizes split_with_sizes split_copy.Tensor split_with_sizes_copy unsafe_split.Tensor "
        "unsafe_split_with_sizes",
        views.split,
    ),
    ("cat", views.cat),
    ("stack", views.stack),
    ("constant_pad_nd", views.pad),
    ("diagonal diagonal_copy", views.diagonal),
    ("diagonal_backward", views.diagonal_backward),
    ("diagonal_scatter", views.diagonal_scatter),
    ("diag_embed", views.diag_embed),
    ("unfold unfold_copy", views.unfold),
    ("unfold_backward", views.unfold_backward),
    ("narrow_copy", ".+,@->."),
    ("rot90", ".+,_,@->."),
    ("view.dtype view_copy.dtype", views.view_as_dtype),
    ("pixel_shuffle", ".(cQR)hw+->.c(hQ)(wR)"),
    ("pixel_unshuffle", ".c(hQ)(wR)+->.(cQR)hw !.chw"),
    ("channel_shuffle native_channel_shuffle", "n(gc):+,#g->n(cg): !g"),
    ("im2col", ".cHW+->.(cK)L !.c"),
    ("col2im", ".(cK)L+->.cHW !.c"),
    ("as_strided as_strided_copy", ":->:"),
    ("as_strided_scatter", ":,:->:"),
    ("gather", at.gather),
    ("scatter.src scatter.value", at.scatter),
    ("scatter_add", at.scatter_add),
    ("index_select", at.index_select),
    ("index_add", at.index_add),
    ("index_fill.int_Scalar index_fill.int_Tensor", at.index_fill),
    ("index_copy", at.index_copy),
    ("index_reduce", at.index_reduce),
    ("scatter_reduce.two", at.scatter_reduce),
    ("take", ":+,.->."),
    ("put", at.put),
    ("searchsorted.Tensor", at.searchsorted),
    ("bucketize.Tensor", ".,N->."),
    ("isin.Tensor_Tensor", ".,:->."),
    ("isin.Tensor_Scalar", ".->."),
    ("histc", at.histc),
    ("_unsafe_masked_index", at.masked_index),
    ("_unsafe_masked_index_put_accumulate", at.masked_index_put),
    ("index.Tensor _unsafe_index.Tensor", at.index),
    ("index_put _unsafe_index_put _index_put_impl", at.index_put),
    # embedding
    ("embedding", "vd+,.<v>->.d"),
    ("embedding_dense_backward", layers.embedding_backward),
    ("_embedding_bag _embedding_bag_forward_only", layers.embedding_bag),
    ("_embedding_bag_backward _embedding_bag_dense_backward", layers.embedding_bag_backward),
    ("_embedding_bag_per_sample_weights_backward", "Bd+,Vd,N,O,N->N"),
    ("actorflow.embedding_part", "vd+,.<v>->.d"),
    ("actorflow.embedding_part_backward", ".d+,.<v>->vd"),
    # experts: rows t, groups e
    ("actorflow.grouped_mm", "tk*,ekn*,t<e>->tn"),
    ("actorflow.grouped_mm_weight", "tk*,tn*,t<e>,_,#e->ekn"),
    # attention: letters b batch, h head, s query, T key, D and E widths
    ("_scaled_dot_product_flash_attention_for_cpu actorflow.causal_attention", layers.attention),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward actorflow.causal_attention_backward",
        layers.attention_backward,
    ),
    ("actorflow.ring_attention", layers.ring_attention),
    ("actorflow.ring_attention_backward", layers.ring_attention_backward),
    ("actorflow.pass_on", layers.pass_on),
    ("actorflow.even_out actorflow.cut_back", layers.even_out),
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
    ("native_group_norm", "n(gC):,(gC),(gC),#n,#(gC),_,#g->n(gC):,ng,ng !g"),
    ("native_group_norm_backward", "n(gC):+,n(gC):,ng,ng,(gC),#n,#(gC),_,#g->n(gC):,(gC),(gC) !g"),
    (
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats "
        "_native_batch_norm_legit_functional",
        layers.batch_norm,
    ),
    ("_native_batch_norm_legit_no_training", "nc:,c,c,c,c->nc:,_,_"),
    ("native_batch_norm_backward", layers.batch_norm_backward),
    ("_weight_norm_interface", layers.weight_norm),
    ("_weight_norm_interface_backward", layers.weight_norm_backward),
    # cells of recurrent networks: the gates side by side
    ("_thnn_fused_lstm_cell", "b(Gh),b(Gh),bh,(Gh),(Gh)->bh,bh,b(Gh)"),
    ("_thnn_fused_lstm_cell_backward_impl", "bh+,bh+,bh,bh,b(Gh)->b(Gh),bh,(Gh)"),
    ("_thnn_fused_gru_cell", "b(Gh),b(Gh),bh,(Gh),(Gh)->bh,b(Qh)"),
    ("_thnn_fused_gru_cell_backward", "bh+,b(Qh)->b(Gh),b(Gh),bh,(Gh),(Gh)"),
    # images
    ("convolution", layers.convolution),
    ("convolution_backward", layers.convolution_backward),
    ("max_pool2d_with_indices adaptive_max_pool2d", ".cHW->.cXY,.cXY !c"),
    ("max_pool3d_with_indices adaptive_max_pool3d", ".cDHW->.cXYZ,.cXYZ !c"),
    ("max_pool2d_with_indices_backward", ".cXY+,.cHW,_,_,_,_,_,.cXY->.cHW !c"),
    ("max_pool3d_with_indices_backward", ".cXYZ+,.cDHW,_,_,_,_,_,.cXYZ->.cDHW !c"),
    ("adaptive_max_pool2d_backward", ".cXY+,.cHW,.cXY->.cHW !c"),
    ("adaptive_max_pool3d_backward", ".cXYZ+,.cDHW,.cXYZ->.cDHW !c"),
    ("fractional_max_pool2d", ".cHW,_,_,.cK->.cXY,.cXY !c"),
    ("fractional_max_pool3d", ".cDHW,_,_,.cK->.cXYZ,.cXYZ !c"),
    ("fractional_max_pool2d_backward", ".cXY+,.cHW,_,_,.cXY->.cHW !c"),
    ("fractional_max_pool3d_backward", ".cXYZ+,.cDHW,_,_,.cXYZ->.cDHW !c"),
    ("max_unpool2d", ".cHW+,.cHW->.cXY !c"),
    ("max_unpool3d", ".cDHW+,.cDHW->.cXYZ !c"),
    ("avg_pool1d adaptive_avg_pool1d", ".cX+->.cY !c"),
    ("avg_pool2d _adaptive_avg_pool2d", ".cHW+->.cXY !c"),
    ("avg_pool3d _adaptive_avg_pool3d", ".cDHW+->.cXYZ !c"),
    ("avg_pool2d_backward _adaptive_avg_pool2d_backward", ".cXY+,.cHW->.cHW !c"),
    ("avg_pool3d_backward _adaptive_avg_pool3d_backward", ".cXYZ+,.cDHW->.cDHW !c"),
    (
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec "
        "upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_trilinear3d.vec _upsample_nearest_exact1d.vec "
        "_upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec _upsample_bilinear2d_aa.vec "
        "_upsample_bicubic2d_aa.vec",
        "nc:+->nc: !c",
    ),
    (
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
        "upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward "
        "upsample_trilinear3d_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward "
        "_upsample_nearest_exact3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward",
        "nc:+,_,#->nc: !c",
    ),
    ("reflection_pad1d replication_pad1d", ".H+->.X !."),
    ("reflection_pad2d replication_pad2d", ".HW+->.XY !."),
    ("reflection_pad3d replication_pad3d", ".DHW+->.XYZ !."),
    ("reflection_pad1d_backward replication_pad1d_backward", ".X+,.H->.H !."),
    ("reflection_pad2d_backward replication_pad2d_backward", ".XY+,.HW->.HW !."),
    ("reflection_pad3d_backward replication_pad3d_backward", ".XYZ+,.DHW->.DHW !."),
    ("grid_sampler_2d", "ncHW+,nxyZ->ncxy"),
    ("grid_sampler_3d", "ncDHW+,nxyzQ->ncxyz"),
    ("grid_sampler_2d_backward", "ncxy+,ncHW,nxyZ->ncHW,nxyZ"),
    ("grid_sampler_3d_backward", "ncxyz+,ncDHW,nxyzQ->ncDHW,nxyzQ"),
    ("affine_grid_generator", "nAB+,#n:->n:"),
    # losses
    (
        "binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss smooth_l1_loss soft_margin_loss",
        losses.loss,
    ),
    (
        "binary_cross_entropy_backward huber_loss_backward mse_loss_backward smooth_l1_loss_backward "
        "soft_margin_loss_backward",
        losses.loss_backward,
    ),
    ("multi_margin_loss multilabel_margin_loss_forward", losses.margin),
    ("multi_margin_loss_backward multilabel_margin_loss_backward", losses.margin_backward),
    ("nll_loss_forward nll_loss2d_forward", losses.nll_loss),
    ("nll_loss_backward nll_loss2d_backward", losses.nll_loss_backward),
    ("actorflow.pick", losses.pick),
    ("actorflow.pick_backward", losses.pick_backward),
    ("actorflow.amax_blocks", losses.amax_blocks),
    ("actorflow.lstsq", ".MN,.MK->.NK,.,.L"),
    ("actorflow.ctc", losses.ctc),
    ("actorflow.ctc_backward", losses.ctc_backward),
    # ops of our own
    ("actorflow.accumulate actorflow.last actorflow.identity actorflow.constrain", ".+->."),
    ("actorflow.first", ".+,_->."),
    ("actorflow.unpack", views.unpack),
    ("actorflow.pack", views.pack),
    ("actorflow.uniform", "_,_,_,,_,_,_,_->."),
    ("actorflow.number", ",_,_->"),
    ("actorflow.add_scaled actorflow.lerp_to", ".+,.+,->."),
    ("actorflow.addcmul_scaled", ".+,.*,.*,->."),
    ("actorflow.addcdiv_scaled", ".+,.+,.,->."),
    ("actorflow.finite", ".->"),  # 0 or NaN
    ("actorflow.adam", ".,.,.,.,.,,,,,,,,,->.,.,.,."),
    ("actorflow.sgd", ".,.,.,,,,,,,,->.,."),
    ("actorflow.adagrad", ".,.,.,,,,,,,->.,."),
)


def _name(short: str) -> str:
    if short.startswith("actorflow."):
        return short
    return f"aten.{short}" if "." in short else f"aten.{short}.default"


TABLE: dict[str, Line] = {_name(short): line for names, line in _LINES for short in names.split()}


def term_of(call: OpCall) -> str | None:
    """The term of an op instance; None where the table has none for it."""
    line = TABLE.get(call.op) or pointwise(call.op)
    return line(call) if callable(line) else line


def has_line(op: str) -> bool:
    """Whether the table has a line for an op."""
    return op in TABLE or pointwise(op) is not None


@functools.cache
def pointwise(op: str) -> str | None:
    """``.,.->.`` for an op that torch tags as pointwise and that is not random; None for any other op."""
    found = overload(op)
    if found is None or schema_of(found).is_mutable or torch.Tag.pointwise not in found.tags:
        return None
    if torch.Tag.nondeterministic_seeded in found.tags:
        return None
    return f"{','.join('.' * len(schema_of(found).arguments))}->{','.join('.' * len(schema_of(found).returns))}"
