"""One iteration: sample, score, update; weights, metrics and checkpoints."""
