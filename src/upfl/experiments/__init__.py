"""The paper's tables and figures as experiments, and the search for hyper-parameters."""
