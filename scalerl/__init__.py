"""ScaleRL Pipelines: studies of how reinforcement learning of language models scales with compute.

The library knows neither Prefect nor the flows that call it. Heavy packages (torch, ray, great_expectations) are
imported inside the functions that need them, so that fitting a curve from a CSV file stays instant.
"""

__version__ = "0.1.0"
