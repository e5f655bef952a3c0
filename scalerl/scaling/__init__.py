"""Compute-performance curves of RL: clean, fit, judge, compare and forecast them. Needs numpy and scipy only."""
