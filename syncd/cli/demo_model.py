"""The small transformer that ``syncd demo`` trains and serves.

Like a real model, it has parts that are hard to merge: tied weights, norms of one dimension, a
buffer of integers, and sizes that two ranks cannot share evenly.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY: Final = 257
_WIDTH: Final = 192
_HEADS: Final = 6
_LAYERS: Final = 4


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.out = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of both layers to ``x``, which has the shape ``(batch, time, width)``."""
        batch, time, _ = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, time, 3, _HEADS, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, _WIDTH))
        added: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + added


class TinyTransformer(nn.Module):
    """A causal language model of about 2 million parameters."""

    tokens_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(DecoderLayer() for _ in range(_LAYERS))
        self.norm = nn.RMSNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, time, vocabulary)`` float32 of tokens ``(batch, time)`` int64."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batch(step: int, rank: int) -> Tensor:
    """Training tokens ``(8, 65)`` int64: each row counts up by a random stride, modulo 257."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    stride = torch.randint(1, 9, (8, 1), generator=generator)
    return (start + stride * torch.arange(65)) % VOCABULARY
