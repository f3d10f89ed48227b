"""Many columns: full covariances of nearly as many as rows, or more, and mean fields without matrices of that size."""
