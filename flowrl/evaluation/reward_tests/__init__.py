"""Does a reward see damage, and does it judge images one by one?"""
