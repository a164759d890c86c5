"""A newcomer whose samples arrive in small batches: its class mix is estimated anew as they come.

What is kept is one row of class scores a sample, never the inputs. After any number of batches the posterior is that of
label-shift correction on all samples together, in whatever batches and order they came.
"""

from __future__ import annotations

import torch
from torch import Tensor

from upfl.contract import Diary, Personalized, Predictor, Published, Unlabelled
from upfl.errors import ConfigError
from upfl.personalize.calibration import Calibrator
from upfl.personalize.label_shift import LabelShift
from upfl.personalize.nothing import Nothing


class Stream:
    """Label-shift correction of a model that stays as it is, over samples as they come."""

    def __init__(self, personalizer: LabelShift, published: Published, client: Unlabelled) -> None:
        """`client` brings its identity, and inputs that tell their form; they are not kept and do not count."""
        if personalizer.Base is not Nothing:
            raise ConfigError(f"{personalizer.name}: only label-shift on the published model can follow a stream")
        self.personalizer, self.published = personalizer, published
        self.calibrator = Calibrator.of(published, Nothing.name)
        self.model = Predictor(personalizer.training, [personalizer.training.start(published, client, None)])
        self.reset()

    def reset(self) -> None:
        """Forget all samples: the client has changed."""
        self.scores = torch.empty(0, len(self.calibrator.prior))

    def __len__(self) -> int:
        return len(self.scores)

    def add(self, x: Tensor) -> Tensor:
        """Take in samples; returns their posteriors, in the light of all that came so far."""
        if not len(x):
            return torch.empty(0, len(self.calibrator.prior))
        logits = self.model.logits(x).cpu()
        self.scores = torch.cat([self.scores, logits.to(self.scores)])
        return self.personalized().logits[len(self.scores) - len(x) :].softmax(1)

    def personalized(self) -> Personalized:
        """All samples so far, and a predictor for others."""
        if not len(self):
            raise ConfigError("no sample has come yet: there is nothing to personalize on")
        base = Personalized(self.scores, self.scores, self.model, Diary(decision="the published model, unchanged"))
        return self.personalizer.corrected(base, self.published)
