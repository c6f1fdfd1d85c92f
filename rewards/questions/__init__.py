"""The questions of a prompt's own record, asked of a judge: DPG-Bench, UniGenBench, GenEval 2."""

from .reward import questions

__all__ = ["questions"]
