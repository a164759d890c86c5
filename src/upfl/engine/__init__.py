"""How rounds are run: batches, workers, evaluation, checkpoint and resume."""
