"""Residual networks with GroupNorm: He et al., Deep Residual Learning for Image Recognition, CVPR 2016; Wu, He, Group
Normalization, ECCV 2018; for federated learning Hsieh et al., The Non-IID Data Quagmire, ICML 2020.

Where clients hold different classes, statistics of a batch say more about the client than about the data; GroupNorm has
none. `resnet8` has three blocks of 16, 32 and 64 channels (78 thousand parameters for CIFAR-10), `resnet18` eight of 64
to 512 (11.2 million), both with a 3x3 convolution first, for small images.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 8  # at most; fewer where channels do not divide


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, inputs: int, channels: tuple[int, ...], blocks: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, channels[0], 3, padding=1, bias=False)
        self.norm = _norm(channels[0])
        stages: list[nn.Module] = []
        before = channels[0]
        for i, width in enumerate(channels):
            for j in range(blocks):
                stages.append(Block(before, width, 2 if i and not j else 1))
                before = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def resnet8(shape: tuple[int, int, int], classes: int, width: float = 1.0) -> ResNet:
    return ResNet(shape[0], _wide((16, 32, 64), width), 1, classes)


def resnet18(shape: tuple[int, int, int], classes: int, width: float = 1.0) -> ResNet:
    return ResNet(shape[0], _wide((64, 128, 256, 512), width), 2, classes)


def _wide(channels: tuple[int, ...], width: float) -> tuple[int, ...]:
    return tuple(max(1, round(one * width)) for one in channels)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)
