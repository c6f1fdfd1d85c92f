"""Several configs and seeds on equal budgets: runs, statistics, tables, figures."""
