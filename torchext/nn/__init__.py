"""Layers: embeddings whose widths adapt while they train (FIITED, Luo et al., arXiv 2401.04408)."""

from torchext.nn.adaptive_embedding import AdaptiveEmbedding, AdaptiveEmbeddingBag
from torchext.nn.pruning import ChunkPruner

__all__ = ["AdaptiveEmbedding", "AdaptiveEmbeddingBag", "ChunkPruner"]
