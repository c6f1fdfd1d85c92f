"""Measures of a set of images: how near it is to another set, and how varied it is."""
