"""Models of a user's own, as a plugin has them: the built-in ones as modules, and small networks of other kinds."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from upfl import models

Shape = tuple[int, int, int]


class Mlp(nn.Module):
    """`upfl.models.mlp` as most would write it, with the same names."""

    def __init__(self, shape: Shape, classes: int, hidden: int = 16) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(math.prod(shape), hidden), nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x.view(x.size(0), -1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


class Convnet(nn.Module):
    """`upfl.models.convnet`, in the paper's order: rectified, then pooled."""

    def __init__(self, shape: Shape, classes: int, hidden: int = 16, width: float = 0.25) -> None:
        super().__init__()
        channels, first, second = shape[0], round(32 * width), round(64 * width)
        self.conv1 = nn.Conv2d(channels, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5, padding=2)
        self.fc1 = nn.Linear(second * (shape[1] // 4) * (shape[2] // 4), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class BatchNormNet(nn.Sequential):
    """Two convolutions with BatchNorm, and one before the head."""

    def __init__(self, shape: Shape, classes: int, channels: int = 4) -> None:
        super().__init__(
            *(nn.Conv2d(shape[0], channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
            *(nn.Conv2d(channels, channels, 3, 2, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(channels * ((shape[1] + 1) // 2) * ((shape[2] + 1) // 2), 12), nn.BatchNorm1d(12), nn.Tanh()),
            nn.Linear(12, classes),
        )


class Dropping(nn.Module):
    """Dropout that no layer shows: as a function."""

    def __init__(self, shape: Shape, classes: int, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate
        self.hidden, self.head = nn.Linear(math.prod(shape), 24), nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(F.dropout(F.relu(self.hidden(x.flatten(1))), self.rate, self.training))
        return logits


class Headless(nn.Sequential):
    """Logits that are means over an image: no linear layer is the last."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__(nn.Conv2d(shape[0], classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


models.register("own-mlp", Mlp)
models.register("own-convnet", Convnet)
models.register("own-batchnorm", BatchNormNet)
models.register("own-dropout", Dropping)
models.register("own-headless", Headless)
