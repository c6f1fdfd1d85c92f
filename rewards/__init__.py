"""Rewards: callables from a `RewardBatch` to one score per picture; NaN means not scored."""
