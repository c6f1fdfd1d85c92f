"""GenEval (Ghosh et al. 2023): its rules over detections, Flow-GRPO's credits, and its files."""
