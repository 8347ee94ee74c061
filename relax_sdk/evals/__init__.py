"""Evaluation: what is played (`plan`), what came of it (`report`), and how two of them compare (`compare`)."""
