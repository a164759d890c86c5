"""Personalizers, one file each, with what is fitted for them. The contract is `upfl.contract`.

    calibration.BASE      temperature and bias of a personalizer's outputs (calibration.py)
    gate.NAME             how weak a prior on the class mix the training clients justify (label_shift.py)
    reliability.NAME      how far accuracy estimates without labels are off (estimate.py)
    choice.auto           how far each candidate's estimate is off (auto.py)
    discriminant.refit    the last layer in closed form, from sums over train splits (refit.py)
    rates.atp             ATP's rate for each tensor, from train splits (atp.py)

A `Correction` stands on another personalizer's calibrated predictions: `label-shift` on those of `none`,
`one-step+label-shift` on FedTTA's adapted model. Oracles are another type (oracle.py): they receive labels, so no
registry, run or bundle holds them.
"""
