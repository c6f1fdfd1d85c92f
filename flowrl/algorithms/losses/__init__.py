"""From log-probs and advantages to a loss."""
