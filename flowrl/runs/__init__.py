"""Everything about a run folder: train, log, report, compare, export."""
