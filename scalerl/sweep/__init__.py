"""Sweeps: arms of one study that share a budget, night after night."""
