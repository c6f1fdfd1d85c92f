"""Which decisions share a ratio, which are trained, and how much each counts."""
