"""The table: a row of the paper is a training algorithm paired with a personalizer.

To add a method, write its file in `training/` or `personalize/` and enter it here: the command line, the engine and the
conformance tests take it from this table. A method of one's own, outside this package, is entered with `register`; the
command line imports the modules that `--plugin` or the environment variable UPFL_PLUGINS names (`plugins.py`).
"""

from dataclasses import dataclass
from typing import Any

from upfl import plugins
from upfl.contract import Personalizer, Task, Training
from upfl.errors import ConfigError
from upfl.personalize.atp import Atp
from upfl.personalize.auto import Auto
from upfl.personalize.calibration import Calibrated, Correction
from upfl.personalize.fedtta import EarlyStopped, OneStep
from upfl.personalize.label_shift import Bbse, Em, LabelShift, MapEm
from upfl.personalize.lame import Lame
from upfl.personalize.nothing import Nothing
from upfl.personalize.one_shot import Fed3R, FedNCM
from upfl.personalize.pfl import Ensemble, Sampled
from upfl.personalize.refit import Refit
from upfl.personalize.tent import Tent
from upfl.suggest import unknown
from upfl.training.afl import AFL
from upfl.training.closed_form import ClosedForm
from upfl.training.fedadg import FedADG
from upfl.training.fedavg import FedAvg
from upfl.training.fedgma import FedGMA
from upfl.training.fedmd import FedMD
from upfl.training.fedper import FedPer
from upfl.training.fedprox import FedProx
from upfl.training.fedsr import FedSR
from upfl.training.fedtta import FedTTA, FedTTAProx
from upfl.training.hetero_fedtta import HeteroFedTTA
from upfl.training.hetero_tent import HeteroTent
from upfl.training.odpfl_hn import OdpflHn
from upfl.training.scaffold import Scaffold


@dataclass(frozen=True)
class Method:
    """A row: what it is called, what trains it, what personalizes it."""

    row: str
    title: str
    training: str
    personalizer: str
    summary: str
    warning: str = ""  # what everyone who sees the row should know


_SENDS_MODELS = "sends training clients' own layers to newcomers"

ROWS = [
    Method("fedavg", "FedAvg", "fedavg", "none", "local SGD, mean of the changes"),
    Method("fedprox", "FedProx", "fedprox", "none", "FedAvg, kept near the received model"),
    Method("scaffold", "SCAFFOLD", "scaffold", "none", "FedAvg, its drift corrected by control variates"),
    Method("afl", "AFL", "afl", "none", "FedAvg, weighted towards clients with a high loss"),
    Method("fedgma", "FedGMA", "fedgma", "none", "FedAvg, masked where clients disagree"),
    Method("fedadg", "FedADG", "fedadg", "none", "features aligned with a generated reference"),
    Method("fedsr", "FedSR", "fedsr", "none", "a Gaussian representation, kept simple"),
    Method(
        "pfl-sampled", "PFL-Sampled", "fedper", "sampled", "FedPer; a random training client's model", _SENDS_MODELS
    ),
    Method("pfl-ensemble", "PFL-Ensemble", "fedper", "ensemble", "FedPer; all training clients' models", _SENDS_MODELS),
    Method("odpfl-hn", "ODPFL-HN", "odpfl-hn", "none", "a hypernetwork makes the model from unlabelled data"),
    Method("tent", "TENT", "fedavg", "tent", "FedAvg, then a step down the entropy of the newcomer's predictions"),
    Method("fedtta", "FedTTA", "fedtta", "one-step", "meta-learned model and guide, then one guided step"),
    Method("fedtta-prox", "FedTTA-Prox", "fedtta-prox", "one-step", "FedTTA kept near the received model's outputs"),
    Method("fedtta++", "FedTTA++", "fedtta-prox", "early-stopped", "FedTTA-Prox, then guided steps to least entropy"),
    Method("label-shift", "Label shift", "fedavg", "label-shift", "FedAvg, then the newcomer's own mix of classes"),
    Method("refit", "Refit", "fedavg", "refit", "FedAvg, its last layer fitted anew in closed form over all clients"),
    Method(
        "refit-label-shift",
        "Refit, label shift",
        "fedavg",
        "refit+label-shift",
        "both: a last layer fitted anew, then the mix of classes",
    ),
    Method("fed3r", "Fed3R", "fedavg", "fed3r", "FedAvg, its last layer by ridge regression over all clients"),
    Method("fedncm", "FedNCM", "fedavg", "fedncm", "FedAvg, class means over all clients as its last layer"),
    Method("atp", "ATP", "fedavg", "atp", "FedAvg, then an entropy step at learned rates"),
    Method("lame", "LAME", "fedavg", "lame", "FedAvg, then predictions that agree with their neighbours'"),
    Method("bbse", "BBSE", "fedavg", "bbse", "FedAvg, then the class mix by the confusion matrix"),
    Method("closed-form", "Closed form", "closed-form", "none", "features and last layer from sums, without gradients"),
    Method(
        "closed-form-label-shift",
        "Closed form, label shift",
        "closed-form",
        "label-shift",
        "the same, then the newcomer's own mix of classes",
    ),
    Method("hetero-fedtta", "HeteroFedTTA", "hetero-fedtta", "one-step", "FedTTA over models of different size"),
    Method("hetero-tent", "hetero-TENT", "hetero-tent", "tent", "TENT over models of different size"),
]

TRAININGS: dict[str, type[Training[Any]]] = {
    training.name: training
    for training in (
        *(FedAvg, FedProx, Scaffold, AFL, FedGMA, FedADG, FedSR, FedPer, OdpflHn, ClosedForm),
        *(FedTTA, FedTTAProx, HeteroFedTTA, HeteroTent),
    )
}
PERSONALIZERS: dict[str, type[Personalizer[Any]]] = {
    personalizer.name: personalizer
    for personalizer in (
        *(Nothing, OneStep, EarlyStopped, Tent, Sampled, Ensemble),
        *(Calibrated, LabelShift, Em, MapEm, Bbse, Atp, Lame, Refit, Fed3R, FedNCM, Auto),
    )
}


CORRECTIONS = 4  # that can stand on each other, as in `tent+label-shift`


def register(
    *,
    training: type[Training[Any]] | None = None,
    personalizer: type[Personalizer[Any]] | None = None,
    row: Method | None = None,
) -> None:
    """Enter a method of one's own. Worker processes import the module that it is defined in."""
    if training is not None:
        TRAININGS[training.name] = training
        plugins.note(training.__module__)
    if personalizer is not None:
        PERSONALIZERS[personalizer.name] = personalizer
        plugins.note(personalizer.__module__)
    if row is not None and row not in ROWS:
        ROWS.append(row)


def resolve(name: str) -> tuple[str, tuple[str, ...]]:
    """The training behind a row's or a training's name, and the personalizers that it is scored under."""
    for method in ROWS:
        if method.row == name:
            return method.training, (method.personalizer,)
    if name in TRAININGS:
        return name, tuple(method.personalizer for method in ROWS if method.training == name) or ("none",)
    raise unknown("method", name, dict.fromkeys([*(method.row for method in ROWS), *TRAININGS]))


def training_class(name: str) -> type[Training[Any]]:
    if name not in TRAININGS:
        raise unknown("training", name, TRAININGS)
    return TRAININGS[name]


def make_training(name: str, task: Task, hyper: Any) -> Training[Any]:
    """A training, with the personalizer that its clients use while they train, where they do."""
    kind = training_class(name)
    if reason := kind.why_not(task):
        raise ConfigError(f"training '{name}' does not fit this model: {reason}")
    training = kind(task, hyper)
    if isinstance(training, FedMD):
        settings = personalizer_class(training.adapts_by).Hyper(**training.adapts_with)
        training.adapt = make_personalizer(training.adapts_by, training, settings)
    return training


def personalizer_class(name: str) -> type[Personalizer[Any]]:
    """A personalizer by its name, or by `BASE+CORRECTION` a correction of another one's predictions."""
    if name.count("+") > CORRECTIONS:
        raise ConfigError(f"'{name[:80]}...': at most {CORRECTIONS} corrections can stand on each other")
    base, plus, last = name.rpartition("+")
    if plus and not (base and last):
        raise ConfigError(f"'{name}': write a personalizer's name, or BASE+CORRECTION such as tent+label-shift")
    if last not in PERSONALIZERS:
        raise unknown("personalizer", last, PERSONALIZERS)
    found = PERSONALIZERS[last]
    if not plus or base == "none":
        return found
    if not issubclass(found, Correction):
        corrections = [key for key, value in PERSONALIZERS.items() if issubclass(value, Correction)]
        raise ConfigError(f"'{name}': only a correction can stand on '{base}': {', '.join(corrections)}")
    return found.on(personalizer_class(base))


def make_personalizer(name: str, training: Training[Any], hyper: Any) -> Personalizer[Any]:
    personalizer = personalizer_class(name)
    if reason := personalizer.why_not(training):
        raise ConfigError(f"personalizer '{name}' does not fit training '{training.name}': {reason}")
    return personalizer(training, hyper)


def row_name(training: str, personalizer: str) -> str:
    """The row's name where the table pairs the two, else both names: `fedtta+none`."""
    for method in ROWS:
        if (method.training, method.personalizer) == (training, personalizer):
            return method.row
    return f"{training}+{personalizer}"


def row_title(row: str) -> str:
    for method in ROWS:
        if method.row == row:
            return method.title
    training, _, personalizer = row.partition("+")
    if training in TRAININGS and all(part in PERSONALIZERS for part in personalizer.split("+")):
        return f"{TRAININGS[training].title} + {personalizer_class(personalizer).title}"
    return row
