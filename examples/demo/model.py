"""A small GPT over bytes. Knows no snapshots."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
"""One token per byte value."""


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a residual connection, a norm before it and dropout after it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.project(seen.transpose(1, 2).reshape(batch, time, width))
        x = x + functional.dropout(mixed, self.dropout, self.training)
        return x + torch.as_tensor(self.feed_forward(x))


class GPT(nn.Module):
    """Predicts the next byte at every position; the output layer shares its weights with the embedding."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy, in nats per byte, of predicting `y` from `x`; both are (batch, time)."""
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())
