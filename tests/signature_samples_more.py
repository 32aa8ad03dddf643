"""Small calls of ops that torch's own samples do not run, or not in the ways that matter here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from signature_values import b, f, n

aten = torch.ops.aten


def _one_and_many(*rest: Any) -> Iterator[Any]:
    for shape in ((5, 7, 3), (2, 1, 3), (6,)):
        yield [f(*shape), *rest]


def _reduced(*rest: Any) -> Iterator[Any]:
    for dim in ([1], [0], [0, -1]):
        for keep in (False, True):
            yield [f(5, 7, 3), *rest, dim, keep]


def _upsample(rank: int, linear: bool, backward: bool, kind: str) -> Iterator[Any]:
    size = (4, 3, 2)[:rank]
    to = [2 * s for s in size]
    corners = [False] if linear else []
    for batch, channels in ((5, 2), (2, 3)):
        shape = (batch, channels, *size)
        if kind == "vec":
            yield [f(*shape), None, *corners, [2.0] * rank]
            yield [f(*shape), to, *corners, None]
        elif backward:
            yield [f(batch, channels, *to), to, list(shape), *corners]
        else:
            yield [f(*shape), to, *corners]


def _upsamples() -> dict[str, Any]:
    found = {}
    for name, rank, linear in (
        ("upsample_nearest1d", 1, False),
        ("upsample_nearest2d", 2, False),
        ("upsample_nearest3d", 3, False),
        ("_upsample_nearest_exact1d", 1, False),
        ("_upsample_nearest_exact2d", 2, False),
        ("_upsample_nearest_exact3d", 3, False),
        ("upsample_linear1d", 1, True),
        ("upsample_bilinear2d", 2, True),
        ("upsample_bicubic2d", 2, True),
        ("upsample_trilinear3d", 3, True),
        ("_upsample_bilinear2d_aa", 2, True),
        ("_upsample_bicubic2d_aa", 2, True),
    ):
        for kind in ("", "vec", "backward"):
            op = f"{name}.vec" if kind == "vec" else f"{name}_{kind}" if kind else name
            found[op] = lambda r=rank, li=linear, k=kind: _upsample(r, li, k == "backward", k)
    return found


def _pads() -> dict[str, Any]:
    found = {}
    for rank in (1, 2, 3):
        pads = [1, 2, 0, 1, 1, 0][: 2 * rank]

        def forward(rank: int = rank, pads: list[int] = pads) -> Iterator[Any]:
            for lead in ((5, 3), (2,), (2, 2)):
                yield [f(*lead, *(4, 5, 3)[:rank]), pads]

        def backward(kind: str, rank: int = rank, pads: list[int] = pads) -> Iterator[Any]:
            for lead in ((5, 3), (2,)):
                x = f(*lead, *(4, 5, 3)[:rank])
                y = getattr(aten, f"{kind}_pad{rank}d")(x, pads)
                yield [f(*y.shape), x, pads]

        for kind in ("reflection", "replication"):
            found[f"{kind}_pad{rank}d"] = forward
            found[f"{kind}_pad{rank}d_backward"] = lambda kind=kind, backward=backward: backward(kind)
    return found


def _pools() -> dict[str, Any]:
    found: dict[str, Any] = {
        "avg_pool1d": lambda: [[f(5, 3, 6), [2], [2], [1]], [f(3, 6), [2]]],
        "adaptive_avg_pool1d": lambda: [[f(5, 3, 6), [4]], [f(2, 6), [3]]],
        "avg_pool3d": lambda: [[f(5, 3, 4, 4, 4), [2, 2, 2]], [f(2, 4, 5, 4), [2, 1, 2], [1, 1, 1], [1, 0, 0]]],
        "_adaptive_avg_pool3d": lambda: [[f(5, 3, 4, 4, 4), [2, 3, 1]], [f(2, 4, 5, 4), [2, 3, 2]]],
        "max_pool3d_with_indices": lambda: [[f(5, 3, 4, 4, 4), [2, 2, 2]], [f(2, 4, 5, 4), [2, 1, 2], [1, 1, 1]]],
        "adaptive_max_pool2d": lambda: [[f(5, 3, 4, 4), [2, 3]], [f(2, 4, 5), [2, 3]]],
        "adaptive_max_pool3d": lambda: [[f(5, 3, 4, 4, 4), [2, 3, 1]], [f(2, 4, 5, 4), [2, 3, 2]]],
    }

    def average(adaptive: bool) -> Iterator[Any]:
        for shape in ((5, 3, 4, 4, 4), (2, 4, 4, 4)):
            grad = f(*shape[:-3], 2, 2, 2)
            yield [grad, f(*shape)] if adaptive else [grad, f(*shape), [2] * 3, [2] * 3, [0] * 3, False, True, None]

    def largest(op: str, space: int) -> Iterator[Any]:
        for shape in ((5, 3, *[4] * space), (2, *[4] * space)):
            x = f(*shape)
            y, at = getattr(aten, op)(x, [2] * space)
            fixed = [] if "adaptive" in op else [[2] * space, [2] * space, [0] * space, [1] * space, False]
            yield [f(*y.shape), x, *fixed, at]

    found["avg_pool3d_backward"] = lambda: average(False)
    found["_adaptive_avg_pool3d_backward"] = lambda: average(True)
    found["max_pool3d_with_indices_backward"] = lambda: largest("max_pool3d_with_indices", 3)
    found["adaptive_max_pool2d_backward"] = lambda: largest("adaptive_max_pool2d", 2)
    found["adaptive_max_pool3d_backward"] = lambda: largest("adaptive_max_pool3d", 3)
    return found


def _bags(what: str) -> Iterator[Any]:
    for mode in (0, 1, 2):
        weight, indices, offsets = f(7, 5), n(9, below=7), torch.tensor([0, 2, 3, 7])
        each = f(9) if mode == 0 else None
        made = aten._embedding_bag(weight, indices, offsets, False, mode, False, each)
        if what == "forward":
            yield [weight, indices, offsets, False, mode, False, each]
        elif what == "each" and each is not None:
            yield [f(4, 5), weight, indices, offsets, made[1], mode]
        elif what == "dense":
            yield [f(4, 5), indices, *made[1:], 7, False, mode, each]
        elif what == "backward":
            yield [f(4, 5), indices, offsets, *made[1:], 7, False, mode, False, each]


def _grids(rank: int, backward: bool) -> Iterator[Any]:
    space, places = (4, 5, 3)[:rank], (3, 2, 5)[:rank]
    for batch in (5, 2):
        x, grid = f(batch, 3, *space), f(batch, *places, rank, low=-1.0, high=1.0)
        if not backward:
            yield [x, grid, 0, 0, False]
            continue
        yield [f(batch, 3, *places), x, grid, 0, 0, False, [True, True]]


def _diagonals(backward: bool) -> Iterator[Any]:
    for shape, offset, i, j in (((5, 7), 0, 0, 1), ((3, 5, 4), 1, 0, -1), ((5, 4, 4, 2), -1, 1, 2)):
        x = f(*shape)
        if backward:
            yield [f(*x.diagonal(offset, i, j).shape), list(shape), offset, i, j]
        else:
            yield [x, offset, i, j]


def _windows(backward: bool) -> Iterator[Any]:
    for shape, dim, size, step in (((5, 6), 1, 2, 2), ((5, 6), 1, 3, 1), ((6, 2), 0, 3, 3), ((5, 7), -1, 3, 3)):
        x = f(*shape)
        yield [f(*x.unfold(dim, size, step).shape), list(shape), dim, size, step] if backward else [x, dim, size, step]


def _scatter_reduce() -> Iterator[Any]:
    for reduce in ("sum", "mean", "prod", "amax"):
        for include in (True, False):
            for dim, at in ((1, n(5, 3, below=7)), (0, n(6, 7, below=5))):
                yield [f(5, 7), dim, at, f(*at.shape), reduce], {"include_self": include}


def _losses() -> dict[str, Any]:
    def forward(*rest: Any, truth: bool = False) -> Iterator[Any]:
        for reduction in (0, 1, 2):
            target = b(5, 7).double() if truth else f(5, 7)
            weight = [f(7, low=0.1)] if truth else []
            yield [f(5, 7, low=0.1, high=0.9), target, *weight, reduction, *rest]

    def backward(*rest: Any, truth: bool = False) -> Iterator[Any]:
        for args in forward(*rest, truth=truth):
            reduction = next(a for a in args if isinstance(a, int))
            yield [f(5, 7) if reduction == 0 else f(), *args]

    found: dict[str, Any] = {}
    for name, rest in (("mse_loss", ()), ("huber_loss", (0.5,)), ("smooth_l1_loss", (0.5,)), ("soft_margin_loss", ())):
        found[name] = lambda rest=rest: forward(*rest)
        found[f"{name}_backward"] = lambda rest=rest: backward(*rest)
    found["binary_cross_entropy"] = lambda: forward(truth=True)
    found["binary_cross_entropy_backward"] = lambda: backward(truth=True)
    return found


def _margins(kind: str, backward: bool) -> Iterator[Any]:
    for reduction in (0, 2, 1):
        x = f(5, 4)
        target = n(5, below=4) if kind == "multi" else torch.where(b(5, 4), n(5, 4, below=4), -1)
        grad = [f(5) if reduction == 0 else f()] if backward else []
        if kind == "multi":
            yield [*grad, x, target, 1, 1.0, f(4, low=0.2), reduction]
        else:
            seen = aten.multilabel_margin_loss_forward(x, target, reduction)[1]
            yield [*grad, x, target, reduction, *([seen] if backward else [])]


def _weight_norm(backward: bool) -> Iterator[Any]:
    for shape, dim, kept in (((5, 3, 2), 0, (5, 1, 1)), ((5, 3), 1, (1, 3)), ((2, 6), 0, (2, 1))):
        v, g = f(*shape), f(*kept, low=0.2)
        if backward:
            yield [f(*shape), v, g, aten._weight_norm_interface(v, g, dim)[1], dim]
        else:
            yield [v, g, dim]


def _symmetric(*lead: int) -> Tensor:
    x = f(*lead, 4, 4)
    return x @ x.mT + 4.0 * torch.eye(4, dtype=torch.float64)


def _systems(op: str) -> Iterator[Any]:
    for lead in ((5,), (2, 3), ()):
        a, right = _symmetric(*lead), f(*lead, 4, 5)
        lower = torch.linalg.cholesky(a)
        if op == "triangular":
            yield [lower, right], {"upper": False}
            yield [lower, right.mT.contiguous()], {"upper": False, "left": False}
        elif op == "lu":
            lu, pivots = torch.linalg.lu_factor(a)
            yield [lu, pivots, right]
            yield [lu, pivots, right.mT.contiguous()], {"left": False}
        elif op == "cholesky":
            yield [right, lower]
        elif op == "orthogonal":
            q, tau = torch.geqrf(a)
            yield [q, tau, right]
            yield [q, tau, right.mT.contiguous(), False]
        else:
            yield [a, right]
            yield [a, f(*lead, 4)]


def _batched(*rest: Any) -> Iterator[Any]:
    for lead in ((5,), (2, 3), ()):
        yield [_symmetric(*lead), *rest]


MORE: dict[str, Any] = {
    **_upsamples(),
    **_pads(),
    **_pools(),
    **_losses(),
    # whole tensors
    **dict.fromkeys(("any", "all", "max", "min", "median", "prod", "mean", "count_nonzero"), _one_and_many),
    "norm.Scalar": lambda: _one_and_many(2),
    "dist": lambda: [[f(5, 7), f(7)]],
    "std.dim": lambda: _reduced_unbiased(),
    "var.dim": lambda: _reduced_unbiased(),
    "norm.ScalarOpt_dim": lambda: _reduced(2),
    "norm.ScalarOpt_dim_dtype": lambda: [([*args], {"dtype": torch.float64}) for args in _reduced(3)],
    "count_nonzero.dim_IntList": lambda: [[n(5, 7, below=2), [1]], [n(5, 7, 3, below=2), [0, 2]]],
    "trace": lambda: [[f(5, 7)]],
    **dict.fromkeys(("cummax", "cummin"), lambda: [[f(5, 7), 1], [f(3, 4, 5), -3]]),
    "median.dim": lambda: [[f(5, 7), 1], [f(5, 7, 3), 0, True]],
    "mode": lambda: [[n(5, 7, below=3), 1], [n(5, 7, 3, below=3), 0, True]],
    "kthvalue": lambda: [[f(5, 7), 2, 1], [f(5, 7, 3), 3, 0, True]],
    "aminmax": lambda: [([f(5, 7)], {"dim": 1}), ([f(5, 7, 3)], {"dim": 0, "keepdim": True})],
    "histc": lambda: [[f(5, 7), 6, -1, 1], [f(5, 7), 6]],
    # matrices
    "addr": lambda: [[f(5, 7), f(5), f(7)], ([f(1, 7), f(5), f(7)], {"beta": 0.5})],
    "addbmm": lambda: [[f(5, 2), f(3, 5, 4), f(3, 4, 2)], [f(2), f(3, 5, 4), f(3, 4, 2)]],
    "_int_mm": lambda: [[n(17, 8, below=9).to(torch.int8), n(8, 16, below=9).to(torch.int8)]],
    "_cdist_forward": lambda: [[f(5, 3), f(4, 3), 2.0, None], [f(2, 5, 3), f(2, 4, 3), 1.0, None]],
    "_cdist_backward": lambda: [
        [f(2, 5, 4), (x := f(2, 5, 3)), (y := f(2, 4, 3)), p, torch.cdist(x, y, p)] for p in (1.0, 3.0)
    ],
    "_pdist_forward": lambda: [[f(5, 3)]],
    "linalg_solve_triangular": lambda: _systems("triangular"),
    "linalg_lu_solve": lambda: _systems("lu"),
    "cholesky_solve": lambda: _systems("cholesky"),
    "ormqr": lambda: _systems("orthogonal"),
    "_linalg_solve_ex": lambda: _systems("full"),
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet"), lambda: [[f(5, 3, 3)], [f(2, 3, 3, 3)], [f(3, 3)]]),
    **dict.fromkeys(("linalg_inv_ex", "linalg_cholesky_ex", "linalg_qr"), _batched),
    **dict.fromkeys(("linalg_eigvals", "_linalg_eigvals", "linalg_matrix_exp"), _batched),
    "_linalg_svd": _batched,
    "_linalg_eigh": _batched,
    "linalg_cross": lambda: [[f(5, 3), f(5, 3)], ([f(3, 4), f(3, 1)], {"dim": 0})],
    # places
    "arange": lambda: [[7], [6.0]],
    "arange.start": lambda: [[2, 9], [-3.0, 4.5]],
    "arange.start_step": lambda: [[2, 15, 3], [5, -6, -2], [0.0, 3.0, 0.5], [0, 7]],
    "as_strided": lambda: [[f(5, 6), [3, 2], [1, 5], 2]],
    "empty_strided": lambda: [[[5, 7], [1, 5]]],
    "scalar_tensor": lambda: [[2.5]],
    "repeat_interleave.Tensor": lambda: [[n(5, below=3)]],
    "unique_dim": lambda: [[n(5, 2, below=2), 0]],
    "unique_dim_consecutive": lambda: [[n(5, 2, below=2), 0]],
    "nonzero": lambda: [[b(5, 7)]],
    "masked_scatter": lambda: [[f(5, 7), b(5, 7), f(5, 7)]],
    "diagonal": lambda: _diagonals(False),
    "diagonal_copy": lambda: _diagonals(False),
    "diagonal_backward": lambda: _diagonals(True),
    "diagonal_scatter": lambda: [[f(3, 5, 4), f(5, 3), 0, 0, 2]],
    "diag_embed": lambda: [[f(5, 3)], [f(5, 3), 1, 0, -1]],
    "unfold": lambda: _windows(False),
    "unfold_copy": lambda: _windows(False),
    "unfold_backward": lambda: _windows(True),
    "narrow_copy": lambda: [[f(5, 7), 1, 2, 3]],
    "view.dtype": lambda: [[f(5, 4), torch.int64], [f(5, 4), torch.float32], [f(5, 1), torch.float32]],
    "view_copy.dtype": lambda: [[f(5, 4), torch.int64], [f(5, 4), torch.float32]],
    "detach_copy": _one_and_many,
    "select_copy.int": lambda: [[f(5, 7), 0, 2], [f(5, 7), 1, -1]],
    "slice_copy.Tensor": lambda: [[f(5, 6), 1, 2, 4], [f(5, 6), 0, 1, 4], [f(5, 6), 1, 1, 6, 2]],
    "split_copy.Tensor": lambda: [[f(5, 6), 2, 1], [f(7, 3), 4]],
    "squeeze_copy.dim": lambda: [[f(5, 1, 2), 1], [f(2, 3), 0]],
    "squeeze_copy.dims": lambda: [[f(5, 1, 2, 1), [1, -1]]],
    "unsafe_split_with_sizes": lambda: [[f(5, 6), [2, 4], 1], [f(6, 2), [2, 2, 2]]],
    "view_as_complex": lambda: [[f(5, 7, 2)], [f(2, 2)]],
    "view_as_complex_copy": lambda: [[f(5, 7, 2)]],
    "view_as_real": lambda: [[torch.complex(f(5, 7), f(5, 7))]],
    "view_as_real_copy": lambda: [[torch.complex(f(5, 7), f(5, 7))]],
    "complex": lambda: [[f(5, 7), f(7)]],
    "polar": lambda: [[f(5, 7), f(7)]],
    "pixel_shuffle": lambda: [[f(5, 8, 3, 2), 2], [f(12, 2, 2), 2]],
    "pixel_unshuffle": lambda: [[f(5, 2, 6, 4), 2], [f(3, 4, 6), 2]],
    "channel_shuffle": lambda: [[f(5, 6, 2, 3), 3], [f(2, 10, 2, 2), 2]],
    "native_channel_shuffle": lambda: [[f(5, 6, 2, 3), 3]],
    "im2col": lambda: [[f(5, 3, 5, 4), [2, 2], [1, 1], [0, 1], [1, 2]], [f(2, 5, 4), [2, 1], [1, 1], [0, 0], [1, 1]]],
    "col2im": lambda: [[f(5, 12, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1]]],
    "grid_sampler_2d": lambda: _grids(2, False),
    "grid_sampler_3d": lambda: _grids(3, False),
    "grid_sampler_2d_backward": lambda: _grids(2, True),
    "grid_sampler_3d_backward": lambda: _grids(3, True),
    "affine_grid_generator": lambda: [[f(5, 2, 3), [5, 3, 4, 2], False], [f(2, 3, 4), [2, 3, 4, 2, 3], True]],
    "isin.Tensor_Tensor": lambda: [[n(5, 7, below=9), n(2, 3, below=9)]],
    "isin.Tensor_Scalar": lambda: [[n(5, 7, below=3), 1]],
    "searchsorted.Tensor": lambda: [
        [f(7).sort()[0], f(5, 3)],
        [f(5, 7).sort()[0], f(5, 3)],
        ([f(5, 7), f(5, 3)], {"sorter": n(5, 7, below=7)}),
    ],
    "bucketize.Tensor": lambda: [[f(5, 7), f(3).sort()[0]]],
    "take": lambda: [[f(5, 7), n(4, 3, below=35)]],
    "put": lambda: [
        [f(5, 7), torch.tensor([3, 1, 34]), f(3)],
        [f(5, 7), n(6, below=35), f(6), True],
        [f(5, 7), n(2, 3, below=35), f(6), True],
    ],
    "scatter_reduce.two": _scatter_reduce,
    "index_fill.int_Scalar": lambda: [
        [f(5, 7), 1, torch.tensor([6, 0, 3]), 0.0],
        [f(5, 7), 0, torch.tensor([4, 1, 1]), 2.0],
    ],
    "index_copy": lambda: [[f(5, 7), 1, torch.tensor([3, 1]), f(5, 2)]],
    "index_reduce": lambda: [[f(5, 7), 1, n(4, below=7), f(5, 4), kind] for kind in ("prod", "amax")],
    # layers
    "glu": lambda: [[f(5, 6), 1], [f(4, 5, 3), 0]],
    "glu_backward": lambda: [[f(5, 3), f(5, 6), 1], [f(2, 5), f(4, 5), 0]],
    "_native_batch_norm_legit_no_training": lambda: [
        [f(5, 3, 4), f(3), f(3), f(3), f(3, low=0.5), 0.1, 1e-5],
        [f(2, 6), None, None, f(6), f(6, low=0.5), 0.1, 1e-5],
    ],
    "_weight_norm_interface": lambda: _weight_norm(False),
    "_weight_norm_interface_backward": lambda: _weight_norm(True),
    "_embedding_bag": lambda: _bags("forward"),
    "_embedding_bag_forward_only": lambda: _bags("forward"),
    "_embedding_bag_backward": lambda: _bags("backward"),
    "_embedding_bag_dense_backward": lambda: _bags("dense"),
    "_embedding_bag_per_sample_weights_backward": lambda: _bags("each"),
    "multi_margin_loss": lambda: _margins("multi", False),
    "multi_margin_loss_backward": lambda: _margins("multi", True),
    "multilabel_margin_loss_forward": lambda: _margins("many", False),
    "multilabel_margin_loss_backward": lambda: _margins("many", True),
    "_fft_c2c": lambda: [[torch.complex(f(5, 4), f(5, 4)), [1], 0, True]],
    "_fft_r2c": lambda: [[f(5, 4), [1], 0, True], [f(3, 4, 5), [0, 2], 1, True]],
    "_fft_c2r": lambda: [[torch.complex(f(5, 3), f(5, 3)), [1], 2, 4]],
}


def _reduced_unbiased() -> Iterator[Any]:
    for dim in ([1], [0, -1]):
        yield [f(5, 7, 3), dim, True, True]
        yield [f(5, 7, 3), dim, False, False]
