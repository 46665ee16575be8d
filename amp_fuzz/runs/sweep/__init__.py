"""A sweep: a matrix of runs, spread over the nodes of a Ray cluster."""
