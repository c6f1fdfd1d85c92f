"""Models that are trained along with the policy and that its loss looks at: copies of its weights
with losses and optimizers of their own. They learn from the same steps of the rollout, before it
does."""
