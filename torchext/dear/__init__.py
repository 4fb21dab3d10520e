"""Gradients are reduced under the backward pass, and parameters gathered under the next forward pass."""
