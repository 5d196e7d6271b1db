"""The default workload of `verify`: a small transformer with everything in it that migrations lose.

A tied head, a frozen part, sizes that no world size from 2 to 4 divides, and buffers of every kind: float, int64 beyond
what a float holds, bool, 0-d, and one that is not saved. All of them take part in the loss, and all that are saved are
drawn from the seed or change while training, so that none can be lost unseen. No 0-d parameter: FSDP and DeepSpeed
refuse those.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

VOCABULARY, LENGTH, WIDTH, HEADS, HIDDEN, BLOCKS = 53, 11, 35, 5, 41, 2
BATCH = 12  # rows of the global batch: 1, 2, 3, 4 and 6 ranks get equal parts
CALLS = 2**40 + 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, causal: Tensor) -> Tensor:
        rows, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(rows, length, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(gelu(self.up(self.norm2(x))))


class DefaultModel(nn.Module):
    gain: Tensor
    temperature: Tensor
    calls: Tensor
    keep: Tensor
    causal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.head.weight = self.embedding.weight
        self.register_buffer("gain", 1 + torch.rand(WIDTH) / 4)
        # Sixteenths, which bf16 holds exactly: a strategy that casts buffers computes the same.
        self.register_buffer("temperature", 1 + torch.randint(0, 16, ()) / 16)
        self.register_buffer("calls", torch.tensor([CALLS, -1]))
        self.register_buffer("keep", torch.rand(LENGTH) < 0.8)
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of next-token logits; `tokens` and `targets` are int64 of (rows, LENGTH)."""
        if self.training:
            self.calls[0] += 1
        place = torch.arange(LENGTH, device=tokens.device)
        x = self.embedding(tokens) * self.keep[:, None] + self.position(place)
        x = x * self.gain.to(x.dtype) + self.frozen(x) / 8
        for block in self.blocks:
            x = block(x, self.causal)
        swing = 1 + (self.calls[0] % 5).to(torch.float32) / 32
        logits = self.head(self.norm(x)).float() * (swing / self.temperature)
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def default_model() -> nn.Module:
    return DefaultModel()


def default_batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: random tokens, and a target for each that a model can learn from it."""
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    return tokens, (7 * tokens + 3) % VOCABULARY
