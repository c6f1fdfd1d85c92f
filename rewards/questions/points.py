"""UniGenBench's 27 test points, in our own words."""

from __future__ import annotations

import re

POINTS = {
    "Style": "art, painting, photography or design style, or an artist's manner",
    "World Knowledge": "people, buildings and things that one has to know",
    "Logical Reasoning": "what follows from the prompt but is not said in it",
    "Text Generation": "the text to be written, without a letter more or less",
    "Compound - Imagination": "what cannot exist",
    "Compound - Feature Matching": "features of several kinds, each on the right thing",
    "Relationship - Composition": "one thing is made of others",
    "Relationship - Inclusion": "one thing is in or on a container or a plane",
    "Relationship - Similarity": "things are alike",
    "Relationship - Comparison": "a property of two things is compared",
    "Grammar - Pronoun Reference": "what a pronoun stands for",
    "Grammar - Negation": "what must not be there",
    "Grammar - Consistency": "a property that several things share",
    "Entity Layout - Two-Dimensional Space": "places in the plane of the image",
    "Entity Layout - Three-Dimensional Space": "places in depth",
    "Attribute - Material": "what it is made of, and its texture",
    "Attribute - Shape": "its shape",
    "Attribute - Expression": "a face that shows a feeling",
    "Attribute - Quantity": "how many there are",
    "Attribute - Size": "how large, long, thick or tall it is",
    "Attribute - Color": "its colour",
    "Action - State": "a state that lasts",
    "Action - Non-contact Interaction": "things act on each other without touching",
    "Action - Full-body": "an action of the whole body",
    "Action - Contact Interaction": "things act on each other by touch",
    "Action - Hand": "an action of hands, and whether they are whole",
    "Action - Animal": "an action of an animal",
}
"""Name -> what it asks. Checked against the counts of the published file: 27 points, 10
primaries."""


def plain(point: str) -> str:
    """Return a test point without brackets and with one space round its dash."""
    bare = re.sub(r"\(.*?\)", "", str(point)).strip()
    return re.sub(r"\s*[-\u2013]\s*", " - ", bare, count=1) if bare not in POINTS else bare
