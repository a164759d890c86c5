"""The paper's tables and figures as experiments, the search for hyper-parameters, and scoring a run anew.

definitions.py   the paper's tables and figures, as data
plan.py          from an experiment to its trainings: each is a run folder whose name follows from its settings
runner.py        runs what is not done yet; the run folders are the state, so a stop needs no record of its own
newcomers.py     scores a training on other new clients (Table 2, data set sizes) without training again
diary.py         a personalizer's steps, one by one, with the accuracies that it does not know
search.py        the only one that speaks to Optuna; a trial (trial.py) is a process that resumes a run folder
score.py         scores a trained run under further personalizers, beside bounds
comparison.py    what these scores say beside each other
"""
