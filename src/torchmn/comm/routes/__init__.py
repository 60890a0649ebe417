"""Routes: the paths by which a sum travels over ranks and nodes, a class each."""
