"""The engine that samples what a plan says, its solvers and its sigma grids."""
