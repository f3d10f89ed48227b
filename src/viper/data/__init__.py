"""Turn whatever a user passes into a source of rows: checks, arrays, files, blocks and Dask."""
