"""What the log-prob of a decision is."""
