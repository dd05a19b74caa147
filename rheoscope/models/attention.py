"""Attention as the model is about to compute it: post-RoPE q, k, v, mask, scale, soft-cap, sinks, and what follows.

What the model calls is in interface.py; the arithmetic is here. Where no map is asked for it is fused SDPA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rheoscope.errors import Refused
from rheoscope.models.blockwise import blockwise
from rheoscope.models.in_place import Workspace, capped, hidden, plus

MEAN_BLOCK = 16  # the same where the maps of a whole batch are averaged
BLOCK = 64  # queries whose maps are alive at a time in `blocks`: of 9 heads and 512 keys 1 MB, which stays in the cache


@dataclass
class Attention:
    """One attention call. Parts are computed when first asked for, and may be replaced by assignment.

    q [batch head query d_head], k and v [batch kv_head key d_head] exactly as they enter the score (after bias,
    QK-norm and RoPE); scores are `scale * q @ k.T` before soft-cap and mask; probs are what multiplies v, so with
    learned sinks their rows sum to less than one. Maps live in a workspace: copy what must outlive the layer.
    """

    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_value"]
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None
    window: int | None = None
    causal: bool = True
    mask: Tensor | None = None  # boolean (True: may attend) or additive; None: causal as `causal` says
    bias: Tensor | None = None
    dropout: float = 0.0
    workspace: Workspace = field(default_factory=Workspace)
    _scores: Tensor | None = None
    _probs: Tensor | None = None
    _z: Tensor | None = None
    _normaliser: Tensor | None = None
    _mean: Tensor | None = None
    _mixed_otherwise: bool = False

    @property
    def scores_replaced(self) -> bool:
        """Whether what acts is no softmax of `scale * q @ k.T`: other scores, or other mixing, were put in place."""
        return self._scores is not None or self._mixed_otherwise

    @property
    def n_rep(self) -> int:
        """Query heads per key head; keys are repeated, head h reads key head h // n_rep."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def allowed(self) -> Bool[Tensor, "#batch #head query key"] | None:
        """True where a query may attend to a key; None where every key is allowed."""
        if self.mask is not None:
            return self.mask if self.mask.dtype == torch.bool else self.mask > torch.finfo(self.mask.dtype).min / 2
        n_query, n_key = self.q.shape[2], self.k.shape[2]
        if not self.causal or n_query == 1:
            return None
        return torch.ones(1, 1, n_query, n_key, dtype=torch.bool, device=self.q.device).tril(0)

    @property
    def scores(self) -> Float[Tensor, "batch head query key"]:
        """Raw scores M = scale * q @ k.T: before soft-cap and mask. A fresh tensor, unless they were replaced."""
        self._refuse_without_softmax()
        if self._scores is not None:
            return self._scores
        return self._products(None)

    @scores.setter
    def scores(self, value: Tensor) -> None:
        self._scores, self._probs, self._z, self._mean = value, None, None, None

    @property
    def probs(self) -> Float[Tensor, "batch head query key"]:
        """Attention probabilities; rows of queries that may see nothing are 0."""
        self._refuse_without_softmax()
        if self._probs is None:
            self._probs = self._softmax()
        return self._probs

    @probs.setter
    def probs(self, value: Tensor) -> None:
        self._probs, self._z, self._mean = value, None, None

    @property
    def mean_probs(self) -> Float[Tensor, "batch query key"]:
        """Attention probabilities averaged over heads, in float32 or better, without the maps of all heads at once.

        Asked for before z, z comes with it where that is possible: by `blockwise`, on a CPU and without a mask.
        """
        self._refuse_without_softmax()
        if self._mean is None and self._z is None and self._plain_on_cpu():
            found = blockwise(self.q, self.k, self.v, scale=self.scale, causal=self.causal and self.q.shape[2] > 1)
            self._z, self._normaliser, self._mean = found
        elif self._mean is None:
            call = self.raised()
            self._mean = call.q.new_zeros(len(call.q), call.q.shape[2], call.k.shape[2])
            for queries, block in call.blocks(MEAN_BLOCK):
                self._mean[:, queries, : block.k.shape[2]] = block.probs.mean(1)
        return self._mean

    def _plain_on_cpu(self) -> bool:
        """Whether this is softmax attention on a CPU with nothing added, in a precision that needs no raising."""
        added = (self.mask, self.bias, self.sinks, self._scores, self._probs)
        square = self.q.shape[2] == self.k.shape[2] and self.q.dtype in (torch.float32, torch.float64)
        return square and self._on_cpu_kernel() and not self.softcap and all(part is None for part in added)

    @property
    def z(self) -> Float[Tensor, "batch head query d_value"]:
        """What each head hands to W_O: probs @ v. By fused SDPA unless the map has been asked for or replaced."""
        if self._z is None:
            needs_map = self._probs is not None or self._scores is not None
            self._z = self._mixed() if needs_map or self.softcap or self.sinks is not None else self._fused()
        return self._z

    @z.setter
    def z(self, value: Tensor) -> None:
        self._z = value

    @property
    def normaliser(self) -> Float[Tensor, "batch head query"] | None:
        """Log-sum-exp of every row of the masked scores, where the fused kernel has left it; None elsewhere."""
        return None if self._scores is not None or self._probs is not None else self._normaliser

    def mix(self, z: Float[Tensor, "batch head query d_value"]) -> None:
        """Put z in place of softmax attention: from here on there are no scores and there is no map."""
        if self.scores_replaced:
            raise Refused(
                "attention without a softmax asked for in a layer whose scores another edit has replaced: its scores "
                "would be lost; make one of the two edits"
            )
        self._z, self._mixed_otherwise = z, True

    def _refuse_without_softmax(self) -> None:
        if self._mixed_otherwise:
            raise Refused(
                "scores or attention map asked for of a layer that an edit has made linear: it has neither; "
                "leave out what reads or edits them"
            )

    def replace_input(self, name: str, value: Tensor) -> None:
        """Put another q, k or v in place; everything that follows is computed anew."""
        setattr(self, name, value)
        self._scores = self._probs = self._z = self._normaliser = self._mean = None
        self._mixed_otherwise = False

    def of_rows(self, rows: Int[np.ndarray, " row"]) -> Attention:
        """The same call for some windows of the batch alone, with memory of its own."""
        parts = {"q": self.q[rows], "k": self.k[rows], "v": self.v[rows]}
        part = replace(self, **parts, workspace=Workspace(), _normaliser=None, _mean=None)
        part._z = self._z[rows] if self._mixed_otherwise else None
        part.mask, part.bias = (x if x is None or x.shape[0] == 1 else x[rows] for x in (self.mask, self.bias))
        part._scores, part._probs = (None if x is None else x[rows] for x in (self._scores, self._probs))
        return part

    def raised(self) -> Attention:
        """The same call with q, k and v in float32 or better, for what is measured: a kernel adds up in float32 too."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        if wide == self.q.dtype:
            return self
        return replace(self, **{name: getattr(self, name).to(wide) for name in ("q", "k", "v")}, workspace=Workspace())

    def blocks(self, size: int = BLOCK, *, every: int = 1) -> Iterator[tuple[slice, Attention]]:
        """The same call a few queries at a time, for maps that need not be alive whole. All blocks share one buffer.

        Under a causal mask keys behind the last query of a block are left out: the maps of a block are narrower.
        Maps are in float32 or better. every: only every so-manieth query, from the first.
        """
        call, workspace = self.raised(), Workspace()
        n_query, n_key = self.q.shape[2], self.k.shape[2]
        triangular = self.mask is None and self.causal and n_query > 1
        for first in range(0, n_query, size * every):
            queries = slice(first, min(first + size * every, n_query), every)
            keys = slice(queries.stop if triangular and self._scores is None else n_key)
            yield queries, call._of_queries(queries, keys, triangular=triangular, workspace=workspace)

    def _of_queries(self, queries: slice, keys: slice, *, triangular: bool, workspace: Workspace) -> Attention:
        parts = {"q": self.q[:, :, queries], "k": self.k[:, :, keys], "v": self.v[:, :, keys]}
        part = replace(self, **parts, causal=False, workspace=workspace, _z=None, _normaliser=None, _mean=None)
        part.mask, part.bias, part._scores, part._probs = (
            x
            if x is None
            else x[:, :, queries if x.shape[2] > 1 else slice(None), keys if x.shape[3] > 1 else slice(None)]
            for x in (self.mask, self.bias, self._scores, self._probs)
        )
        if triangular:
            places = torch.arange(self.k.shape[2], device=self.q.device)
            part.mask = (places[queries, None] >= places[keys])[None, None]
        return part

    def scores_of_head(self, head: int) -> Float[Tensor, "batch query key"]:
        """Raw scores of one head: a fresh tensor."""
        self._refuse_without_softmax()
        if self._scores is not None:
            return self._scores[:, head].clone()
        return self.q[:, head] @ self.k[:, head // self.n_rep].mT * self.scale

    def _products(self, workspace: Workspace | None) -> Tensor:
        batch, heads, n_query, d_head = self.q.shape
        n_key = self.k.shape[2]
        q = self.q.reshape(batch, self.k.shape[1], self.n_rep * n_query, d_head)
        if workspace is None or torch.is_grad_enabled():
            return (q @ self.k.mT).reshape(batch, heads, n_query, n_key) * self.scale
        flat = workspace.empty((batch * self.k.shape[1], self.n_rep * n_query, n_key), self.q)
        torch.baddbmm(flat, q.flatten(0, 1), self.k.mT.flatten(0, 1), beta=0, alpha=self.scale, out=flat)
        return flat.view(batch, heads, n_query, n_key)

    def _softmax(self) -> Tensor:
        recording = torch.is_grad_enabled()
        scores = self._products(self.workspace) if self._scores is None else self._scores
        if self._scores is not None and not recording:
            scores = scores.clone()  # from here on all is done in place
        if self.softcap:
            scores = capped(scores, self.softcap)
        if self.bias is not None:
            scores = plus(scores, self.bias)
        allowed = self.allowed
        additive = self.mask is not None and self.mask.dtype != torch.bool
        if additive:
            scores = plus(scores, self.mask)
        elif allowed is not None:
            scores = hidden(scores, ~allowed)
        gain = None
        if self.sinks is not None:
            log_total = scores.logsumexp(-1, keepdim=True)
            gain = torch.sigmoid(log_total - self.sinks.to(scores.dtype).reshape(1, -1, 1, 1))
        half = scores.dtype in (torch.float16, torch.bfloat16)
        if recording or half:
            probs = scores.softmax(-1, dtype=torch.float32 if half else None).to(self.v.dtype)
        else:
            probs = torch.softmax(scores, -1, out=scores)
        if allowed is not None and not bool(allowed.any(-1).all()):
            probs = probs.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        if gain is None:
            return probs
        return probs * gain if recording else probs.mul_(gain)

    def _mixed(self) -> Tensor:
        batch, heads, n_query, n_key = self.probs.shape
        probs = nn.functional.dropout(self.probs, self.dropout) if self.dropout else self.probs
        rows = probs.reshape(batch, self.v.shape[1], -1, n_key)
        return (rows @ self.v).reshape(batch, heads, n_query, self.v.shape[-1])

    def _fused(self) -> Tensor:
        mask = self.mask
        if self.bias is not None:
            allowed = self.allowed
            mask = self.bias if allowed is None else self.bias.masked_fill(~allowed, -torch.inf)
        k, v = (x.repeat_interleave(self.n_rep, 1) if self.n_rep > 1 else x for x in (self.k, self.v))
        causal = mask is None and self.causal and self.q.shape[2] > 1
        if self._on_cpu_kernel():
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (self.q, k, v))  # the kernel takes it for 1
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=self.q.dtype).masked_fill_(~mask, -torch.inf)
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            z, self._normaliser = kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=self.scale)
            return z
        return nn.functional.scaled_dot_product_attention(
            self.q, k, v, attn_mask=mask, dropout_p=self.dropout, scale=self.scale, is_causal=causal
        )

    def _on_cpu_kernel(self) -> bool:
        """Whether SDPA would run its CPU kernel, which then is called for its row normalisers as well as z."""
        same_width = self.q.shape[-1] == self.v.shape[-1]
        return self.q.device.type == "cpu" and same_width and not self.dropout and not torch.is_grad_enabled()
