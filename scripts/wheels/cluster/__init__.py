"""Compile and prove on the workers of a Dask scheduler."""
