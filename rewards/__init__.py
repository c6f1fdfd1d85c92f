"""Rewards: callables from a `RewardBatch` to one score per image; NaN means not scored."""
