"""What local steps are made of: the cross-entropy with its gradient, and the SGD update."""

import torch
from torch import Tensor

from upfl.state import State, norm


def cross_entropy(logits: Tensor, batch_y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy over the samples whose mask is 1, and its gradient with respect to the logits."""
    weight = (mask / mask.sum()).unsqueeze(1)
    log_p = logits.log_softmax(1)
    target = torch.zeros_like(log_p).scatter_(1, batch_y.unsqueeze(1), 1.0)
    loss = -(log_p * target * weight).sum()
    return loss, (log_p.exp() - target) * weight


def sgd_(params: State, gradients: State, rate: float, weight_decay: float, clip: float) -> None:
    """params <- params - rate * (clip(gradients) + weight_decay * params), in place. The gradients are used up."""
    values, steps = list(params.values()), [gradients[name] for name in params]
    clip_(steps, clip)
    torch._foreach_mul_(values, 1 - rate * weight_decay)
    torch._foreach_add_(values, steps, alpha=-rate)


def clip_(gradients: list[Tensor], largest: float) -> None:
    """Scale gradients down to a joint norm of at most `largest`, in place."""
    torch._foreach_mul_(gradients, (largest / (norm(gradients) + 1e-6)).clamp(max=1.0))
