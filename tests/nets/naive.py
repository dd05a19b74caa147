"""Every kind of attention as its formula reads: one query and one key at a time, one head of one document.

q, k [position d_head], v [position d_value], d (damping) and e (energy) [position]. Differentiable, in any precision.
"""

import math

import torch


def weighted(weights, v):
    return sum(w * v[j] for j, w in enumerate(weights)) / sum(weights)


def softmax(q, k, v):
    scale = 1 / math.sqrt(q.shape[1])
    rows = []
    for i in range(len(q)):
        rows.append(weighted([torch.exp(scale * q[i] @ k[j]) for j in range(i + 1)], v))
    return torch.stack(rows)


def skew_score(q, k, i, j):
    return (q[i] @ k[j] - k[i] @ q[j]) / math.sqrt(q.shape[1])


def sd(q, k, v, d):
    rows = []
    for i in range(len(q)):
        scores = [skew_score(q, k, i, j) - (d[i] if i == j else 0) for j in range(i + 1)]
        rows.append(weighted([torch.exp(score) for score in scores], v))
    return torch.stack(rows)


def sd_linear(q, k, v, d):
    rows = []
    for i in range(len(q)):
        row = -d[i] * v[i]
        for j in range(i):
            row = row + skew_score(q, k, i, j) * v[j]
        rows.append(row / math.sqrt(i + 1))
    return torch.stack(rows)


def elu_plus_one(x):
    return torch.nn.functional.elu(x) + 1


def elu(q, k, v):
    rows = []
    for i in range(len(q)):
        rows.append(weighted([elu_plus_one(q[i]) @ elu_plus_one(k[j]) for j in range(i + 1)], v))
    return torch.stack(rows)


def sd_elu(q, k, v):
    return elu(torch.cat([q, k], 1), torch.cat([k, -q], 1), v)


def gates(e, slope, threshold, *, causal, floor):
    values = []
    for j in range(len(e)):
        seen = e[: j + 1] if causal else e
        mean = sum(seen) / len(seen)
        variance = sum((x - mean) ** 2 for x in seen) / len(seen)
        z = (e[j] - mean) / torch.sqrt(variance + floor)
        values.append(1 / (1 + torch.exp(-slope * (z - threshold))))
    return values


def ega(q, k, v, gate):
    scale = 1 / math.sqrt(q.shape[1])
    rows = []
    for i in range(len(q)):
        weights = [torch.exp(scale * q[i] @ k[j]) for j in range(i + 1)]
        total = sum(weights)
        gated = [gate[j] * w / total for j, w in enumerate(weights)]
        rows.append(weighted(gated, v))
    return torch.stack(rows)


def lag_conv(q, k, v, logits):
    scale, shares = 1 / math.sqrt(q.shape[1]), torch.softmax(logits, 0)
    rows = []
    for i in range(len(q)):
        scores = []
        for j in range(i + 1):
            near = [shares[lag] * (q[i] @ k[j - lag]) for lag in range(len(shares)) if j - lag >= 0]
            scores.append(torch.exp(scale * sum(near)))
        rows.append(weighted(scores, v))
    return torch.stack(rows)


def stacked(function, *inputs, **options):
    """The formula for every document and head of tensors [batch head ...]."""
    documents = []
    for b in range(len(inputs[0])):
        documents.append(
            torch.stack([function(*(x[b, h] for x in inputs), **options) for h in range(inputs[0].shape[1])])
        )
    return torch.stack(documents)
