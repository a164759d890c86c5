"""What was measured: pages, the summaries of runs that they are made of, and the command that makes them."""
