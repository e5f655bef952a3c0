"""Parquet parts, DuckDB views and data checks; imports nothing of the other packages."""
