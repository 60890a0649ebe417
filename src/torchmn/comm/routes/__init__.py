"""Routes: the paths of a sum through ranks and nodes, one class for each."""
