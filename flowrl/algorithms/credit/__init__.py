"""From rewards to one advantage per decision."""
