"""The commands of `flowrl`: read arguments, print results, nothing else."""
