"""Techniques that no shipped config names: functions of the axes that a config finds by name.

Each has a published formula, and most were made for texts. `flowrl.config.axes` says which file
belongs to which axis; nothing imports this package.
"""
