"""The small factor T that stands for a pair of tall matrices, so that no N x N matrix is ever formed.

The spectra of M = s Q K^T and of its parts depend on Q and K only through the Gram matrix of X = [sQ K]. Any T with
T^T T = X^T X has the same, and ours has 2 d_head columns and at most 2 d_head + 1 rows.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from rheoscope.errors import RheoscopeError

# Cholesky of the Gram matrix moves each singular value of S, F or M by a share of at most about 1e-15 tr(C^-1), with C
# the Gram of the columns at unit length. Heads of a trained 135 M model have 1e5 at most. Above the limit: QR.
GRAM_LIMIT = 1e6


@torch.no_grad()
def score_factors(
    Q: Float[Tensor, "*batch position d_head"],
    K: Float[Tensor, "*kv_batch position d_head"],
    *,
    scale: float,
    valid: Bool[Tensor, "*#batch position"] | None = None,
) -> Float64[Tensor, "*batch row column"]:
    """Factor T of the scores M = scale Q K^T: T^T T = X^T X for X = [scale Q, K], with 2 d_head columns.

    The first row holds sqrt(N) times the mean of X over positions, the others the factor of the centred X; see
    `centred_factors`. Rows: min(N, 2 d_head + 1). Fewer key heads (dimension -3) than query heads are repeated, each
    for its group. Positions where `valid` is False are left out. Raises RheoscopeError on values that are not finite.
    """
    grouped_shape(Q, K)
    Q, K = as_float64(Q), as_float64(K)
    n, r = Q.shape[-2:]
    mark = Q.new_ones((n, 1))
    if valid is not None:
        Q, K = (X.masked_fill(~valid[..., None], 0) for X in (Q, K))
        mark = valid[..., None].to(Q)
    mark = mark / mark.sum(-2, keepdim=True).clamp(min=1).sqrt()

    def columns() -> Float64[Tensor, "*batch position column"]:
        return torch.cat([mark.expand(*Q.shape[:-1], 1), Q, repeated_keys(Q, K)], -1)

    R = _from_gram_or_qr(_score_gram(mark.amax(-2), Q, K), columns) if n > 2 * r else _by_qr(columns())
    T = R[..., 1:]
    T[..., :r] *= scale
    return T


def _score_gram(
    mark: Float64[Tensor, "*#batch 1"],
    Q: Float64[Tensor, "*batch position d_head"],
    K: Float64[Tensor, "*kv_batch position d_head"],
) -> Float64[Tensor, "*batch column column"]:
    """Lower half of the Gram matrix of a column of length 1, Q and K; the keys of a group are not repeated.

    mark: what that column holds at every position, but at those where Q and K are zero.
    """
    *heads, group, n, r = grouped_shape(Q, K)
    gram = Q.new_zeros((*Q.shape[:-2], 2 * r + 1, 2 * r + 1))
    of_group = gram.view(*heads, group, 2 * r + 1, 2 * r + 1)
    of_group[..., 0, 0] = 1
    of_group[..., 1 : r + 1, 0] = (Q.sum(-2) * mark).reshape(*heads, group, r)
    of_group[..., r + 1 :, 0] = (K.sum(-2) * mark).reshape(*heads, 1, r)
    of_group[..., 1 : r + 1, 1 : r + 1] = (Q.mT @ Q).reshape(*heads, group, r, r)
    Q, K = Q.reshape(*heads, group, n, r), K.reshape(*heads, n, r)
    of_group[..., r + 1 :, r + 1 :] = (K.mT @ K)[..., None, :, :]
    side_by_side = K.mT @ Q.transpose(-3, -2).reshape(*heads, n, group * r)  # one product for all heads of a group
    of_group[..., r + 1 :, 1 : r + 1] = side_by_side.unflatten(-1, (group, r)).transpose(-3, -2)
    return gram


@torch.no_grad()
def kernel_factors(
    W_Q: Float[Tensor, "*batch d_model d_head"], W_K: Float[Tensor, "*kv_batch d_model d_head"]
) -> Float64[Tensor, "*batch row column"]:
    """Factor T of the kernel W_QK = W_Q W_K^T, as `score_factors` but for weights: no scale, no row of means.

    Rows: min(d_model, 2 d_head). Key heads are repeated for their groups.
    """
    return triangular_factor(torch.cat([as_float64(W_Q), as_float64(repeated_keys(W_Q, W_K))], -1))


def centred_factors(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch rest column"]:
    """Factor of H M H, H = I - 11^T/N: the scores with row and column means removed; T from `score_factors`.

    H S H = S - (f_i - f_j) with f the row mean of S, so this is the gauge-removed routing part.
    """
    return T[..., 1:, :]


def rotated_keys(
    T: Float64[Tensor, "*batch row column"], rotations: Float[Tensor, "lag d_head d_head"]
) -> Float64[Tensor, "*batch lag row column"]:
    """Factors of Q R K^T for every rotation R: the lag-dependent kernels W_Q R_lag W_K^T of a model with RoPE.

    Reduced once, then rotated in the small factor as K R^T. A core takes 130 kB at d_head 64: pass some dozens of lags.
    """
    T_Q, T_K = split_factors(T[..., None, :, :])
    T_K = T_K @ as_float64(rotations).mT
    return torch.cat([T_Q.expand(T_K.shape), T_K], -1)


def split_factors(
    T: Float64[Tensor, "*batch row column"],
) -> tuple[Float64[Tensor, "*batch row d_head"], Float64[Tensor, "*batch row d_head"]]:
    """Query half and key half of a factor: M has the nonzero spectrum of T_Q T_K^T."""
    r = T.shape[-1] // 2
    return T[..., :r], T[..., r:]


def repeated_keys(
    Q: Float[Tensor, "*batch position d_head"], K: Float[Tensor, "*kv_batch position d_head"]
) -> Float[Tensor, "*batch position d_head"]:
    """Keys, each head repeated for its group of query heads (repeated, never tiled)."""
    if Q.shape == K.shape:
        return K
    grouped_shape(Q, K)
    return K.repeat_interleave(Q.shape[-3] // K.shape[-3], -3)


def grouped_shape(
    Q: Float[Tensor, "*batch position d_head"], K: Float[Tensor, "*kv_batch position d_head"]
) -> tuple[int, ...]:
    """Shape of the queries with the head axis split in (key heads, query heads per key head)."""
    heads, kv_heads = (X.shape[-3] if X.dim() > 2 else 1 for X in (Q, K))
    if Q.dim() != K.dim() or Q.shape[-2:] != K.shape[-2:] or Q.shape[:-3] != K.shape[:-3] or heads % kv_heads:
        raise RheoscopeError(
            f"scores need queries and keys of one shape, or a number of key heads that divides the query heads; "
            f"queries are {tuple(Q.shape)} and keys {tuple(K.shape)}: pass both as (..., head, position, d_head)."
        )
    return (*Q.shape[:-3], kv_heads, heads // kv_heads, *Q.shape[-2:])


def triangular_factor(X: Float64[Tensor, "*batch tall wide"]) -> Float64[Tensor, "*batch row wide"]:
    """Factor R with R^T R = X^T X and min(tall, wide) rows, upper triangular.

    From the Cholesky factor of the Gram matrix where that is as good as QR, item by item, and from QR elsewhere.
    """
    return _by_qr(X) if X.shape[-2] < X.shape[-1] else _from_gram_or_qr(X.mT @ X, lambda: X)


def _from_gram_or_qr(
    gram: Float64[Tensor, "*batch wide wide"], columns: Callable[[], Float64[Tensor, "*batch tall wide"]]
) -> Float64[Tensor, "*batch wide wide"]:
    """Cholesky factor of a Gram matrix, of which the lower half is read; from QR of its columns where that is better.

    GRAM_LIMIT decides. Only a Gram matrix with a bad item asks for the columns.
    """
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    L, failed = torch.linalg.cholesky_ex(gram / lengths[..., :, None] / lengths[..., None, :])
    unit = torch.eye(gram.shape[-1], device=gram.device).expand_as(L)
    inverse = torch.linalg.solve_triangular(L.float(), unit, upper=False)  # to decide by, float32 is enough
    accurate = (failed == 0) & (inverse.square().sum((-2, -1)) <= GRAM_LIMIT)
    R = L.mT * lengths[..., None, :]
    if not accurate.all():
        R[~accurate] = _by_qr(columns()[~accurate])
    return R


def _by_qr(X: Float64[Tensor, "*batch tall wide"]) -> Float64[Tensor, "*batch row wide"]:
    """Factor R of X from QR. Raises RheoscopeError where a value is not finite: Cholesky leaves those to it."""
    R = torch.linalg.qr(X, mode="r")[1]
    if not torch.isfinite(R).all():
        raise RheoscopeError(
            "a spectrum was asked of vectors with values that are NaN, infinite or beyond the range of their squares; "
            "run the model in bfloat16 or float32 if it overflows in float16."
        )
    return R


def as_float64(X: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """The same values in float64, on the CPU where the device has no float64 (MPS)."""
    return (X.cpu() if X.device.type == "mps" else X).to(torch.float64)
