"""Image grids and the HTML page of a run."""
