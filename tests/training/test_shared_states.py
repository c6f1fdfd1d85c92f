"""Units that share a state go through the network together."""

from __future__ import annotations

import pytest
import torch

from flowrl.training.batches import Minibatch, cut

# states of each unit in the order of the minibatch, largest call -> states of each call
TABLE = [
    # the first chunks of 4 samples of one prompt: their first state is common, 5 rows in place of 8
    ([{0, 11}, {0, 12}, {0, 13}, {0, 14}], 5, [{0, 11, 12, 13, 14}]),
    # two prompts, mixed: each is one call
    ([{0, 11}, {1, 21}, {0, 12}, {1, 22}], 3, [{0, 11, 12}, {1, 21, 22}]),
    # too many for one call: the common state is computed again
    ([{0, 11}, {0, 12}, {0, 13}], 3, [{0, 11, 12}, {0, 13}]),
    # a unit that is larger than a call stays whole
    ([{0, 11, 12, 13}, {0, 14}], 3, [{0, 11, 12, 13}, {0, 14}]),
    # nothing is shared: the order stays
    ([{5, 6}, {1, 2}, {3}], 3, [{5, 6}, {1, 2, 3}]),
]


@pytest.mark.parametrize(("units", "size", "wanted"), TABLE)
def test_calls(units: list[set[int]], size: int, wanted: list[set[int]]) -> None:
    rows = [(place, state) for place, states in enumerate(units) for state in sorted(states)]
    place, state = (torch.tensor(column) for column in zip(*rows, strict=True))
    node = torch.arange(len(rows))
    calls = cut(Minibatch(node, place), state, size)
    assert [set(state[call.node].tolist()) for call in calls] == wanted
    assert sorted(torch.cat([call.node for call in calls]).tolist()) == node.tolist()
    for call in calls:
        # a unit is in one call
        mine = set(place[call.node].tolist())
        assert sum(len(units[p]) for p in mine) == len(call.node)
        # each state is one row of the network
        first, index = call.rows
        assert len(first) == len(set(state[call.node].tolist()))
        assert torch.equal(state[call.node][first][index], state[call.node])
