"""Texts: a vector for each token, their sum, and a linear layer (Joulin et al., Bag of Tricks for Efficient Text
Classification, EACL 2017).

    h = sum over tokens t of E[t] / sqrt(number of tokens)        z = W h + b

The sum is divided by the square root of its length, so that features have the same size whatever the length. Padding
(token 0) does not count.
"""

from __future__ import annotations

from torch import Tensor, nn


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, dimension: int, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dimension)
        self.head = nn.Linear(dimension, classes)

    def forward(self, x: Tensor) -> Tensor:
        there = (x != 0).unsqueeze(2).to(self.tokens.weight.dtype)
        total = (self.tokens(x) * there).sum(1)
        logits: Tensor = self.head(total / there.sum(1).clamp(min=1).sqrt())
        return logits
