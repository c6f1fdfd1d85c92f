"""Curves, image grids and the HTML page of a run."""
