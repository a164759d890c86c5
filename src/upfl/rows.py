"""The rows of the table, as names: what trains each and what personalizes it.

Plain data, without PyTorch, so that the command line can list them at once. `methods.py` has the classes.
"""

from dataclasses import dataclass


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
    Method("auto", "Auto", "fedavg", "auto", "FedAvg, then the most promising of several, chosen without labels"),
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

# Personalizers without a row of their own: `--score` takes them, on any training.
FURTHER = {
    "calibrated": "temperature and bias of the predictions, fitted over training clients",
    "em": "the newcomer's mix of classes by expectation-maximisation",
    "map-em": "the same, the most probable mix under a prior",
}
