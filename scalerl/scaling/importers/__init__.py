"""Logs of any trainer, read into columns: tables, Weights & Biases, TensorBoard, MLflow, verl-style consoles."""
