"""Whatever a user passes, as a source of rows: checks, arrays, files, blocks and Dask."""
