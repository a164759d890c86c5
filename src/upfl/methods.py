"""The table: a row of the paper is a training algorithm paired with a personalizer.

To add a method, write its file in `training/` or `personalize/`, enter its class here and its row in `rows.py`: the
command line, the engine and the conformance tests take it from there. A method of one's own, outside this package, is
entered with `register`; the command line imports the modules that `--plugin` or UPFL_PLUGINS names (`plugins.py`).
"""

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
from upfl.rows import ROWS as ROWS
from upfl.rows import Method as Method
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


OWN = "One of your own is made known by --plugin MODULE or UPFL_PLUGINS=MODULE"
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
    raise unknown("method", name, dict.fromkeys([*(method.row for method in ROWS), *TRAININGS]), OWN)


def training_class(name: str) -> type[Training[Any]]:
    if name not in TRAININGS:
        raise unknown("training", name, TRAININGS, OWN)
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


def why_not(row: Method, task: Task) -> str | None:
    """Why a row of the table does not fit a task, in words; None where it fits."""
    kind = training_class(row.training)
    if reason := kind.refuses_models or kind.why_not(task):
        return reason
    try:
        training = make_training(row.training, task, kind.Hyper())
    except ConfigError as error:  # a hyper-parameter that does not suit the model
        return str(error)
    return personalizer_class(row.personalizer).why_not(training)


def personalizer_class(name: str) -> type[Personalizer[Any]]:
    """A personalizer by its name, or by `BASE+CORRECTION` a correction of another one's predictions."""
    if name.count("+") > CORRECTIONS:
        raise ConfigError(f"'{name[:80]}...': at most {CORRECTIONS} corrections can stand on each other")
    base, plus, last = name.rpartition("+")
    if plus and not (base and last):
        raise ConfigError(f"'{name}': write a personalizer's name, or BASE+CORRECTION such as tent+label-shift")
    if last not in PERSONALIZERS:
        raise unknown("personalizer", last, PERSONALIZERS, OWN)
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
        return f"{TRAININGS[training].title} + {personalizer}"
    return row
