"""Training algorithms, one file each. The contract is `upfl.contract`; `base` has what most have in common."""
