"""A small language model on real text: real gradients and real compute for benchmarks of training.

The text is Python's own reference manual, which every Python brings along (``pydoc_data.topics``, half a megabyte),
read as bytes. Which bytes a rank sees in a step depends on (seed, rank, step) alone.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_SYMBOLS = 256


@functools.cache
def text() -> Tensor:
    """Returns the text, one byte an element."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    return torch.frombuffer(bytearray("\n\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def describe_text() -> dict[str, Any]:
    """Returns what identifies the text, for a results file: it differs between versions of Python."""
    return {
        "text": "pydoc_data.topics",
        "bytes": len(text()),
        "sha256": hashlib.sha256(bytes(text().tolist())).hexdigest()[:16],
    }


def batch(seed: int, rank: int, step: int, *, samples: int, length: int) -> Tensor:
    """Returns ``samples`` pieces of the text, ``length + 1`` symbols each: inputs, and the same moved by one."""
    generator = torch.Generator().manual_seed((seed * 4096 + rank) * 1_000_003 + step)
    starts = torch.randint(len(text()) - length, (samples, 1), generator=generator)
    return text()[starts + torch.arange(length + 1)].long()


class _Block(nn.Module):
    """Attention and a perceptron, each behind a norm.

    Without biases: that of the keys has no influence on the loss, so its gradient is rounding alone, and Adam would
    turn that into steps of full length that no two ways to add agree on.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        packed = self.queries_keys_values(self.attention_norm(hidden))
        split = packed.view(samples, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        queries, keys, values = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.attention_output(mixed.transpose(1, 2).reshape(samples, length, width))
        output: Tensor = hidden + self.perceptron(self.perceptron_norm(hidden))
        return output


class LanguageModel(nn.Module):
    """A decoder-only Transformer over bytes; its output weights are its embeddings.

    Args:
        layers: Number of blocks.
        width: Of the hidden state.
        heads: Of each attention.
        length: The longest sequence.
    """

    def __init__(self, *, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_SYMBOLS, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.body = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        """Returns the mean loss in nats a symbol of ``samples x (length + 1)`` symbols, each predicted by those before.

        The loss is computed inside: what DDP wraps is all of a step's forward pass.
        """
        inputs, targets = symbols[:, :-1], symbols[:, 1:]
        hidden = self.norm(self.body(self.embedding(inputs) + self.positions[: inputs.shape[1]]))
        scores = functional.linear(hidden, self.embedding.weight)
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
