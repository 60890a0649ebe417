"""What every wing may import: errors, events, names, and the private side of torch and Python."""
