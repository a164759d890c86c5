"""The contract: what a training, a personalizer and whoever runs them agree on.

    clients.py        a client as training code sees it (`Client`, `Batch`), and as a personalizer does (`Unlabelled`)
    stage.py          rounds over clients whose messages are summed (`Stage`, `Phase`, `Total`)
    training.py       a training algorithm (`Training`), what it learns (`Task`), what it hands out (`Published`)
    predictor.py      a client's own model (`Predictor`), and how it came to it (`Personalized`, `Diary`)
    personalizer.py   a personalizer (`Personalizer`), and what is fitted for it (`Need`, `Fit`)

Trainings (`training/`) and personalizers (`personalize/`) stand on this package, not on each other's contract. Nothing
here or there imports the data, the engine, files or the network.
"""

from upfl.contract.clients import Batch, Client, Split, Unlabelled
from upfl.contract.personalizer import (
    FITS,
    FOLDS,
    CrossFitted,
    Fit,
    HasNeeds,
    Need,
    Personalizer,
    needs_of,
    varies,
)
from upfl.contract.predictor import CHUNK, Diary, Estimate, Likeness, Personalized, Predictor, all_logits, chunks
from upfl.contract.stage import Hyper, Noise, Phase, Stage, Step, Total
from upfl.contract.training import Architecture, Published, Task, Training

__all__ = [
    "CHUNK",
    "FITS",
    "FOLDS",
    "Architecture",
    "Batch",
    "Client",
    "CrossFitted",
    "Diary",
    "Estimate",
    "Fit",
    "HasNeeds",
    "Hyper",
    "Likeness",
    "Need",
    "Noise",
    "Personalized",
    "Personalizer",
    "Phase",
    "Predictor",
    "Published",
    "Split",
    "Stage",
    "Step",
    "Task",
    "Total",
    "Training",
    "Unlabelled",
    "all_logits",
    "chunks",
    "needs_of",
    "varies",
]
