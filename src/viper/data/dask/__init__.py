"""Rows in the partitions of Dask collections."""
